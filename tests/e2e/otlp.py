"""An OTLP/HTTP receiver that keeps the spans it is sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    start: int
    end: int
    attributes: dict[str, object]


@dataclass
class Receiver:
    endpoint: str
    spans: list[Span] = field(default_factory=list)

    def tree(self, trace_id: bytes) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]


@contextmanager
def receiver() -> Iterator[Receiver]:
    box = Receiver("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for s in scope.spans:
                        attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in s.attributes}
                        box.spans.append(
                            Span(
                                names["service.name"],
                                s.name,
                                s.trace_id,
                                s.span_id,
                                s.parent_span_id,
                                s.start_time_unix_nano,
                                s.end_time_unix_nano,
                                attributes,
                            )
                        )
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    box.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield box
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
