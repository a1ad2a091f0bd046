"""What a request found in which cache, and why it missed the rest: in every API's usage, row, metrics, span and log."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway import ledger
from services.protocol.events import CachedRun, CacheTree
from services.protocol.generate import Missed
from tests.gateway.fake_engines import MODEL, Call, FakeEngines
from tests.gateway.http_gateway import Gateway, gateway

COST: dict[str, Any] = {
    "cached_device": 3,
    "cached_host": 4,
    "cached_disk": 1,
    "computed_tokens": 9,
    "queue_seconds": 0.5,
    "restore_seconds": 0.25,
}


def missing(position: int = 2, **fields: Any) -> FakeEngines:
    """Each answer says that all behind `position` was missed."""
    engines = FakeEngines()

    def play(call: Call) -> None:
        call.say("Hi")
        call.finish(**COST, missed=Missed(reason="new", position=position, **fields))  # type: ignore[arg-type]

    engines.on_call = play
    return engines


def chat(*turns: str) -> list[dict[str, str]]:
    roles = ("system", *("user", "assistant") * len(turns))
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


async def ask(g: Gateway, api: str, stream: bool) -> dict[str, Any]:
    """The usage that an API tells of `Hello`, at its end."""
    says = [{"role": "user", "content": "Hello"}]
    body: dict[str, Any] = {"model": MODEL, "stream": stream}
    match api:
        case "chat":
            path, rest = "/v1/chat/completions", {"messages": says, "stream_options": {"include_usage": True}}
            body |= rest if stream else {"messages": says}
        case "completions":
            path = "/v1/completions"
            body |= {"prompt": "Hello", **({"stream_options": {"include_usage": True}} if stream else {})}
        case "messages":
            path = "/v1/messages"
            body |= {"messages": says, "max_tokens": 9}
        case _:
            path = "/v1/responses"
            body |= {"input": "Hello"}
    reply = await g.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        return reply.json()["usage"]
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    told = [json.loads(line) for line in lines]
    found = [event.get("usage") or event.get("response", {}).get("usage") for event in told]
    return [usage for usage in found if usage][-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "completions", "messages", "responses"])
async def test_the_usage_of_every_api(api: str, stream: bool) -> None:
    async with gateway(missing()) as g:
        usage = await ask(g, api, stream)
        prompt = len(g.engines.calls[0].prompt)
    ours = usage.pop("samovar")
    assert ours.pop("missed") == {
        "reason": "new",
        "text": f"tokens 2 to {prompt} were never seen",
        "found": 2,
        "known": 2,
        "lost": None,
        "since": 0.0,
        "taker": "",
        "diverged_at": None,
        "message": None,
        "role": "",
    }
    assert ours == {
        **COST,
        "cached_host": min(4, prompt - 3),
        "preemptions": 0,
        "prefill_seconds": 0.0,
        "decode_seconds": 0.0,
    }
    cached = 3 + min(4, prompt - 3)
    standard: dict[str, object] = {
        "chat": {
            "prompt_tokens": prompt,
            "completion_tokens": 3,
            "total_tokens": prompt + 3,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "messages": {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 3,
        },
        "responses": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + 3,
        },
    }
    assert usage == standard["chat" if api == "completions" else api]


async def test_a_changed_message_is_named_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(ledger, "_tracer", provider.get_tracer("test"))
    caplog.set_level(logging.INFO, ledger.__name__)
    async with gateway(missing(position=12), str(tmp_path / "s.db")) as g:
        await g.chat(messages=chat("Be brief.", "One secret"), session_id="s")
        edited = chat("Be brief.", "One secrets", "Hi", "And?")
        usage = (await g.chat(messages=edited, session_id="s")).json()["usage"]
        first, second = (len(call.prompt) for call in g.engines.calls)
        differs = len(b"?system\nBe brief.?\n?user\nOne secret")
        text = f"diverged at token {differs}, in message 1 (user)"
        missed = usage["samovar"]["missed"]
        assert (missed["reason"], missed["text"], missed["known"]) == ("diverged", text, 12)
        assert (missed["diverged_at"], missed["message"], missed["role"]) == (differs, 1, "user")

        assert await g.deps.sessions.flush(5)
        row = (await g.http.get("/api/sessions/s")).json()["requests"][0]
        assert row["missed"] == missed
        assert (row["cached_disk"], row["computed_tokens"]) == (1, 9)

        assert await g.sample("missed_tokens_total", reason="new") == first - 12
        assert await g.sample("missed_tokens_total", reason="diverged") == second - 12
        for tier, tokens in (("device", 6), ("host", 6), ("disk", 2)):
            assert await g.sample("cached_tokens_total", tier=tier) == tokens
        assert await g.sample("computed_tokens_total") == 18
        assert await g.sample("restore_seconds_sum") == 0.5
        assert await g.sample("queue_seconds_count") == 2
        metrics = (await g.http.get("/metrics")).text
    attributes = dict(exporter.get_finished_spans()[-1].attributes or {})
    assert (attributes["samovar.missed.reason"], attributes["samovar.missed.text"]) == ("diverged", text)
    assert (attributes["samovar.usage.cached_disk"], attributes["samovar.usage.computed_tokens"]) == (1, 9)
    assert attributes["samovar.usage.restore_seconds"] == 0.25
    assert "cached=7 (device 3, host 3, disk 1) computed=9" in caplog.text
    assert f"missed: {text}" in caplog.text
    for told in (metrics, caplog.text, str(attributes), json.dumps(row)):
        assert "secret" not in told


async def test_an_answer_is_part_of_the_context_that_is_gone_on_with() -> None:
    async with gateway(missing(position=0)) as g:
        await g.chat(messages=chat("Be brief.", "One" * 30), session_id="s")
        going_on = chat("Be brief.", "One" * 30, "Hi", "Two")
        usage = (await g.chat(messages=going_on, session_id="s")).json()["usage"]
        known = len(g.engines.calls[0].prompt) + len(b"Hi?")
        assert usage["samovar"]["missed"]["known"] == known
        assert usage["samovar"]["missed"]["text"].endswith(f"tokens {known} to {usage['prompt_tokens']} are new")


async def test_the_trees_of_all_engines() -> None:
    engines = FakeEngines()
    run = CachedRun(name=b"\xff" * 32, start=0, tokens=128, device=64, host=128, session_id="s", standing="waiting")
    engines.trees["engine-0"] = CacheTree(
        engine_id="engine-0",
        runs=(run,),
        page_bytes=1024,
        state_bytes=0,
        pages_total=8,
        pages_held=0,
        pages_cached=1,
    )
    async with gateway(engines, api_keys=("key",)) as g:
        assert (await g.http.get("/samovar/cache")).status_code == 401
        reply = await g.http.get("/samovar/cache", headers={"authorization": "Bearer key"})
    first, second, third = reply.json()["engines"]
    assert (first["engine_id"], first["state"], first["error"]) == ("engine-0", "ready", "")
    assert first["tree"]["runs"][0]["session_id"] == "s"
    assert (second["engine_id"], second["tree"]) == ("engine-1", None)
    assert "no reply" in second["error"]
    assert (third["state"], third["tree"], third["error"]) == ("loading", None, "it is loading")
