"""services.cli.stack: the settings of a run and the environment that each service gets."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.cli import machine
from services.cli.runtime import Runtime
from services.cli.service import Service
from services.cli.stack import KV_ARENA_MOST, Services, Stack, default_arena
from services.settings import SettingsError
from tests.ports import free_port


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return {"PATH": os.environ["PATH"], "SAMOVAR_DATA_DIR": str(tmp_path / "data"), "SAMOVAR_PORT": "0"}


def built(environ: dict[str, str]) -> dict[str, Service]:
    runtime = Runtime.make()
    try:
        services = Services(Stack.load(environ), runtime, "secret")
        return {service.name: service for phase in services.phases() for service in phase}
    finally:
        runtime.remove()


def test_services_share_nats_and_socket_and_differ_in_ports(environ: dict[str, str], tmp_path: Path):
    services = built(environ | {"SAMOVAR_MODEL": "scripted:x.jsonl"})
    assert list(services) == ["nats", "kvstore", "engine-0", "gateway"]
    for name in ("engine-0", "gateway"):
        url = urlsplit(services[name].environ["SAMOVAR_NATS_URL"])
        assert (url.username, url.password, url.hostname) == ("samovar", "secret", "127.0.0.1")
    engine, store, gateway = services["engine-0"], services["kvstore"], services["gateway"]
    assert engine.environ["SAMOVAR_KV_SOCKET"] == store.environ["SAMOVAR_KV_SOCKET"]
    assert engine.environ["SAMOVAR_MODEL"] == "scripted:x.jsonl"
    assert engine.environ["SAMOVAR_ENGINE_ID"] == "engine-0"
    assert len({engine.metrics_port, store.metrics_port, int(gateway.environ["SAMOVAR_PORT"])}) == 3
    assert gateway.environ["SAMOVAR_DATABASE"] == str(tmp_path / "data" / "sessions.db")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    assert "CUDA_VISIBLE_DEVICES" not in engine.environ
    assert "SAMOVAR_THREADS" not in engine.environ


def test_own_choices_are_kept(environ: dict[str, str], tmp_path: Path):
    database = str(tmp_path / "mine.db")
    services = built(environ | {"SAMOVAR_DATABASE": database, "SAMOVAR_KV_ARENA": "64MiB", "SAMOVAR_ENGINES": "2"})
    assert services["gateway"].environ["SAMOVAR_DATABASE"] == database
    assert services["kvstore"].environ["SAMOVAR_KV_ARENA"] == "64MiB"
    assert not (tmp_path / "data").exists()


def test_grace_covers_the_drain_timeout(environ: dict[str, str]):
    services = built(environ | {"SAMOVAR_DRAIN_TIMEOUT": "100"})
    assert services["gateway"].grace > 100
    assert services["engine-0"].grace > 100
    assert services["kvstore"].grace < 10, "it has nothing to finish"


def test_a_kvstore_with_a_disk_gets_time_to_write_to_it(environ: dict[str, str]):
    services = built(environ | {"SAMOVAR_DRAIN_TIMEOUT": "100", "SAMOVAR_KV_DISK": "/var/kv:4GiB"})
    assert services["kvstore"].grace > 100
    assert services["kvstore"].environ["SAMOVAR_KV_DISK"] == "/var/kv:4GiB"


def test_without_a_kvstore_the_engine_has_no_socket(environ: dict[str, str]):
    services = built(environ | {"SAMOVAR_KVSTORE": "false", "SAMOVAR_KV_SOCKET": "/left/over.sock"})
    assert list(services) == ["nats", "engine-0", "gateway"]
    assert "SAMOVAR_KV_SOCKET" not in services["engine-0"].environ


def test_engines_take_turns_on_the_gpus(environ: dict[str, str]):
    services = built(environ | {"SAMOVAR_ENGINES": "3", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})
    devices = [services[f"engine-{i}"].environ["CUDA_VISIBLE_DEVICES"] for i in range(3)]
    assert devices == ["GPU-a", "GPU-b", "GPU-a"]


def test_engines_share_the_cores(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "cores", lambda: 5)
    environ |= {"SAMOVAR_ENGINES": "2", "SAMOVAR_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "0"}
    services = built(environ)
    assert services["engine-1"].environ["SAMOVAR_THREADS"] == "2"
    assert services["engine-1"].environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert built(environ | {"SAMOVAR_THREADS": "7"})["engine-1"].environ["SAMOVAR_THREADS"] == "7"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SAMOVAR_ENGINES", "0"),
        ("SAMOVAR_PORT", "http"),
        ("SAMOVAR_DEVICE", "tpu"),
        ("SAMOVAR_KV_ARENA", "a lot"),
        ("SAMOVAR_KV_DISK", "/var/kv"),
        ("SAMOVAR_KV_PAGES", "-1"),
        ("SAMOVAR_START_TIMEOUT", "0"),
        ("SAMOVAR_KVSTORE", "perhaps"),
    ],
)
def test_bad_settings_of_any_service_are_named(environ: dict[str, str], name: str, value: str):
    with pytest.raises(SettingsError, match=f"{name}='{value}'"):
        Stack.load(environ | {name: value})


@pytest.mark.parametrize(("variable", "option"), [("SAMOVAR_PORT", "--port"), ("SAMOVAR_NATS_PORT", "--nats-port")])
def test_port_in_use(environ: dict[str, str], variable: str, option: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port} is in use: choose another one with {option}"):
            Stack.load(environ | {variable: str(port)})


def test_host_that_is_not_ours(environ: dict[str, str]):
    with pytest.raises(SettingsError, match=r"192\.0\.2\.1.*--host"):
        Stack.load(environ | {"SAMOVAR_HOST": "192.0.2.1", "SAMOVAR_PORT": str(free_port())})


def warnings(environ: dict[str, str]) -> list[str]:
    return Stack.load(environ).warnings(environ)


def test_warns_of_an_open_door(environ: dict[str, str]):
    assert warnings(environ) == []
    assert warnings(environ | {"SAMOVAR_HOST": "localhost"}) == []
    assert warnings(environ | {"SAMOVAR_HOST": "0.0.0.0", "SAMOVAR_API_KEYS": "k"}) == []
    (text,) = warnings(environ | {"SAMOVAR_HOST": "0.0.0.0"})
    assert "SAMOVAR_API_KEYS" in text


def test_warns_of_settings_without_effect(environ: dict[str, str]):
    (text,) = warnings(environ | {"SAMOVAR_NATS_URL": "nats://elsewhere:4222"})
    assert "SAMOVAR_NATS_URL" in text


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("0.0.0.0", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
        ("::", "http://[::1]:"),
        ("localhost", "http://localhost:"),
    ],
)
def test_url(environ: dict[str, str], host: str, url: str):
    runtime = Runtime.make()
    services = Services(Stack.load(environ | {"SAMOVAR_HOST": host}), runtime, "secret")
    runtime.remove()
    assert services.url == f"{url}{services.port}"


def test_nats_takes_our_configuration(environ: dict[str, str]):
    runtime = Runtime.make()
    stack = Stack.load(environ)
    Services(stack, runtime, "0123456789abcdef")
    check = subprocess.run([stack.nats_server, "-t", "-c", runtime.nats_config], capture_output=True, text=True)
    runtime.remove()
    assert check.returncode == 0, check.stderr


def test_default_arena():
    assert default_arena(4 * 2**30) == 2**30
    assert default_arena(2**40) == KV_ARENA_MOST
    assert default_arena(2**30 + 5) % 2**20 == 0


def test_cli_brings_no_torch():
    source = "import sys, services.cli.__main__; assert not {'torch', 'litestar', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True)


def test_a_port_that_is_held_is_free_for_its_service_alone() -> None:
    with machine.hold_port() as holder:
        address = holder.getsockname()
        for _ in range(2):  # a service that is started again
            with socket.create_server(address) as server, socket.create_connection(address, timeout=5):
                server.accept()[0].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        assert not holder.get_inheritable()
