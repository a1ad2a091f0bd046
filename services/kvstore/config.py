"""Settings of the kvstore."""

from typing import Annotated

from msgspec import Struct

from services.settings import ByteSize, LogLevel, MetricsHost, MetricsPort, describe


class KvStoreConfig(Struct, frozen=True, kw_only=True):
    kv_socket: Annotated[str, describe("Unix socket to listen on.")] = "/tmp/samovar-kv.sock"
    kv_arena: Annotated[ByteSize, describe("Host memory for cache blocks: the hard limit, taken as it fills.")] = (
        ByteSize(2**30)
    )
    metrics_port: MetricsPort = 0
    metrics_host: MetricsHost = "127.0.0.1"
    log_level: LogLevel = "info"
