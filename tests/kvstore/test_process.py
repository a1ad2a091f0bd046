"""`python -m services.kvstore` as a process: start, refusal to start, end, metrics, spans."""

import asyncio
import signal
import socket
import urllib.request
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.kvstore import connection
from services.kvstore.arena import Arena
from services.kvstore.server import Server
from services.kvstore.store import Store
from services.protocol import kv
from tests.kvstore.process import RawClient, refused, running


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_with_clients_connected(socket_path: Path, signum: signal.Signals) -> None:
    with running(socket_path) as store, RawClient(socket_path) as client:
        client.reserve(b"a")
        assert socket_path.stat().st_mode & 0o777 == 0o600
        assert store.stop(signum) == 0
        assert not socket_path.exists()
        assert "Traceback" not in store.log
        with pytest.raises(EOFError):
            client.reply()


def test_the_socket_of_a_killed_server_is_replaced(socket_path: Path) -> None:
    with running(socket_path) as store:
        store.kill()
        assert socket_path.exists()
        with running(socket_path) as second, RawClient(socket_path) as client:
            assert client.states(b"a") == ("miss",)
            assert second.stop() == 0


def test_a_live_server_is_not_replaced(socket_path: Path) -> None:
    with running(socket_path), RawClient(socket_path) as client:
        assert "a kvstore is serving there already" in refused(socket_path)
        assert client.states(b"a") == ("miss",)
        with RawClient(socket_path) as late:
            assert late.states(b"a") == ("miss",)


def test_a_path_that_is_no_socket_is_left_alone(socket_path: Path) -> None:
    socket_path.write_text("precious")
    assert f"SAMOVAR_KV_SOCKET={socket_path}: there is a file that is no socket" in refused(socket_path)
    assert socket_path.read_text() == "precious"


def test_a_path_that_cannot_be_listened_on(tmp_path: Path) -> None:
    assert "cannot listen there" in refused(tmp_path / "no" / "folder")
    assert "cannot listen there" in refused(tmp_path / ("long" * 40))


def test_an_arena_larger_than_the_memory_is_refused(socket_path: Path) -> None:
    line = refused(socket_path, arena="1000TiB")
    assert "SAMOVAR_KV_ARENA=1000TiB is more than the" in line
    assert "set SAMOVAR_KV_ARENA to less" in line
    assert not socket_path.exists()


def test_a_bad_setting_is_one_line(socket_path: Path) -> None:
    assert "SAMOVAR_KV_ARENA='lots'" in refused(socket_path, arena="lots")


def test_a_metrics_port_in_use_is_refused(socket_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"SAMOVAR_METRICS_PORT={port}" in refused(socket_path, SAMOVAR_METRICS_PORT=str(port))
    assert not socket_path.exists()


def test_metrics(socket_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(socket_path, "8KiB", SAMOVAR_METRICS_PORT=str(port)) as store, RawClient(socket_path) as client:
        client.put(b"a", length=8192)
        client.call(kv.Lease, keys=(b"a", b"b"))
        client.call(kv.Release, lease=1)
        client.put(b"c")
        client.call(kv.Lease, keys=(b"c",))
        client.reserve(b"d")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = set(answer.read().decode().splitlines())
        assert {
            "samovar_kvstore_arena_bytes 8192.0",
            "samovar_kvstore_used_bytes 8192.0",
            "samovar_kvstore_objects 1.0",
            "samovar_kvstore_reserved 1.0",
            "samovar_kvstore_leased 1.0",
            "samovar_kvstore_connections 1.0",
            "samovar_kvstore_hits_total 2.0",
            "samovar_kvstore_misses_total 1.0",
            "samovar_kvstore_evictions_total 1.0",
            'samovar_kvstore_calls_total{verb="lease"} 2.0',
            'samovar_kvstore_calls_total{verb="reserve"} 3.0',
            'samovar_kvstore_calls_total{verb="hello"} 1.0',
        } <= lines
        assert store.stop() == 0


async def test_spans_belong_to_the_request_that_is_traced(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(connection, "tracer", provider.get_tracer("test"))
    arena = Arena(2**20)
    server = Server(str(socket_path), arena, Store(arena))
    serving = asyncio.create_task(server.serve())

    def talk() -> None:
        with RawClient(socket_path) as client:
            parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
            entries = (kv.Entry(key=b"a", length=5000, cost=1.0), kv.Entry(key=b"b", length=2**21, cost=1.0))
            client.call(kv.Reserve, entries=entries, trace=parent)
            client.call(kv.Commit, keys=(b"a",))
            client.call(kv.Lease, keys=(b"a", b"b", b"c"), trace=parent)
            client.call(kv.Lease, keys=(b"a",))
            client.call(kv.Lease, keys=(b"a",), trace="nonsense")

    await asyncio.to_thread(talk)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    server.close()
    arena.close()
    reserve, lease, orphan = spans.get_finished_spans()
    assert [span.name for span in (reserve, lease, orphan)] == ["kvstore.reserve", "kvstore.lease", "kvstore.lease"]
    for span in (reserve, lease):
        assert span.context is not None
        assert span.context.trace_id == int("ab" * 16, 16)
        assert span.parent is not None
        assert span.parent.span_id == int("cd" * 8, 16)
    assert dict(reserve.attributes or {}) == {"kvstore.keys": 2, "kvstore.hits": 1, "kvstore.bytes": 5000}
    assert dict(lease.attributes or {}) == {"kvstore.keys": 3, "kvstore.hits": 1, "kvstore.bytes": 5000}
    assert orphan.parent is None
