"""What Prometheus is told, read from the index when it asks."""

from collections.abc import Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvstore.index import Index
from services.kvstore.server import Server
from services.settings import SettingsError

NAMESPACE = "samovar_kvstore_"


class KvStoreCollector(Collector):
    """Runs on the HTTP server's threads and only reads, so that the store itself counts nothing twice."""

    def __init__(self, index: Index, server: Server) -> None:
        self._index = index
        self._server = server

    def collect(self) -> Iterable[Metric]:
        counts = self._index.counts()
        gauges = (
            ("arena_bytes", "Size of the arena.", counts.arena_bytes),
            ("used_bytes", "Bytes of committed and reserved objects.", counts.used_bytes),
            ("objects", "Committed objects.", counts.objects),
            ("reserved", "Objects that are being written.", counts.reserved),
            ("leased", "Objects that a lease pins.", counts.leased),
            ("connections", "Open connections.", self._server.connections),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(NAMESPACE + name, text, value=value)
        counters = (
            ("hits", "Keys asked for in a lease and there.", counts.hits),
            ("misses", "Keys asked for in a lease and not there.", counts.misses),
            ("evictions", "Objects evicted to make room.", counts.evictions),
        )
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
