"""Settings of the kvstore."""

from typing import Annotated

from msgspec import Struct

from services.kvstore.disk_space import DiskSpace
from services.settings import ByteSize, LogLevel, MetricsHost, MetricsPort, describe


class KvStoreConfig(Struct, frozen=True, kw_only=True):
    kv_socket: Annotated[str, describe("Unix socket to listen on.")] = "/tmp/samovar-kv.sock"
    kv_arena: Annotated[ByteSize, describe("Host memory for cache blocks: the hard limit, taken as it fills.")] = (
        ByteSize(2**30)
    )
    kv_disk: Annotated[
        str,
        describe("Disk tier below the arena, FOLDER:SIZE: contexts survive a restart there. Empty: none."),
    ] = ""
    drain_timeout: Annotated[
        float, describe("Seconds on SIGTERM to write to disk what is not there yet, most worth first.", ge=0)
    ] = 30.0
    metrics_port: MetricsPort = 0
    metrics_host: MetricsHost = "127.0.0.1"
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        self.disk_space()

    def disk_space(self) -> DiskSpace | None:
        """Raises SettingsError when `kv_disk` cannot be read."""
        return DiskSpace.parse(self.kv_disk) if self.kv_disk else None
