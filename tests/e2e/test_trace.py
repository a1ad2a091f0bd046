"""One request, one tree of spans over gateway, engine and kvstore."""

from pathlib import Path

from tests.e2e import otlp
from tests.e2e.stack import running, wait_until
from tests.e2e.test_cache import conversation


def test_one_request_is_one_tree(tmp_path: Path) -> None:
    with otlp.receiver() as receiver:
        settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with running(tmp_path, "--kv-pages", "16", "--kv-size", "256MiB", **settings) as stack:
            for number in (0, 1, 2, 0):
                stack.chat(conversation(number), max_tokens=4)
                wait_until(
                    "its blocks are written through",
                    lambda n=number: stack.metric("kvstore", "samovar_kvstore_objects") >= 8 * min(n + 1, 3),
                )
            roots = wait_until("four requests", lambda: _roots(receiver))
            wait_until("the last one's engine span", lambda: len(receiver.tree(roots[-1].trace_id)) >= 6)
        tree = receiver.tree(roots[-1].trace_id)
        assert {span.service for span in tree} == {"samovar-gateway", "samovar-engine", "samovar-kvstore"}
        by_id = {span.span_id: span for span in tree}
        assert [span for span in tree if span.parent_id not in by_id] == [roots[-1]]
        assert {"engine.queue", "engine.restore", "engine.prefill", "engine.decode"} <= {span.name for span in tree}
        root = roots[-1]
        assert root.attributes["gen_ai.usage.output_tokens"] == 4
        assert root.attributes["gen_ai.usage.cache_read.input_tokens"] >= 448
        assert all(root.start <= span.start <= span.end for span in tree)


def _roots(receiver: otlp.Receiver) -> list[otlp.Span] | None:
    roots = sorted(
        (s for s in receiver.spans if s.service == "samovar-gateway" and s.name.startswith("chat ")),
        key=lambda s: s.start,
    )
    return roots if len(roots) == 4 else None
