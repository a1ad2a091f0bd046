"""What Prometheus is told, read from the store when it asks."""

from collections.abc import Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvstore.server import Server
from services.kvstore.store import Store
from services.settings import SettingsError

NAMESPACE = "samovar_kvstore_"


class KvStoreCollector(Collector):
    """Runs on the HTTP server's threads and only reads, so that the store itself counts nothing twice."""

    def __init__(self, store: Store, server: Server) -> None:
        self._store = store
        self._server = server

    def collect(self) -> Iterable[Metric]:
        counts = self._store.counts()
        gauges = [
            ("arena_bytes", "Size of the arena.", counts.arena_bytes),
            ("used_bytes", "Bytes of committed and reserved objects.", counts.used_bytes),
            ("objects", "Committed objects.", counts.objects),
            ("reserved", "Objects that are being written.", counts.reserved),
            ("leased", "Objects that a lease pins.", counts.leased),
            ("connections", "Open connections.", self._server.connections),
        ]
        counters = [
            ("hits", "Keys asked for in a lease and there.", counts.hits),
            ("misses", "Keys asked for in a lease and not there.", counts.misses),
            ("evictions", "Objects evicted to make room.", counts.evictions),
        ]
        disk = self._store.disk_counts()
        if disk is not None:
            gauges += [
                ("disk_bytes", "Room on disk.", disk.disk_bytes),
                ("disk_used_bytes", "Bytes of objects on disk, and of their journal.", disk.used_bytes),
                ("disk_objects", "Objects on disk.", disk.objects),
                ("unsaved_bytes", "Bytes of the arena that are not on disk.", counts.unsaved_bytes),
            ]
            counters += [
                ("spilled", "Objects written to disk.", disk.spilled),
                ("reloaded", "Objects read back from disk.", disk.reloaded),
                ("torn", "Objects on disk that were found damaged.", disk.torn),
                ("disk_evictions", "Objects on disk evicted to make room there.", disk.evictions),
            ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(NAMESPACE + name, text, value=value)
        for name, text, value in counters:
            yield CounterMetricFamily(NAMESPACE + name, text, value=value)
        calls = CounterMetricFamily(NAMESPACE + "calls", "Calls by verb.", labels=["verb"])
        for verb, number in dict(self._server.calls).items():
            calls.add_metric([verb], number)
        yield calls


def serve_metrics(collector: KvStoreCollector, host: str, port: int) -> WSGIServer:
    """Serve /metrics from a thread of its own until `shutdown` of what is returned. Raises SettingsError."""
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise SettingsError(f"SAMOVAR_METRICS_PORT={port}: cannot serve on {host}: {error}") from None
    return server
