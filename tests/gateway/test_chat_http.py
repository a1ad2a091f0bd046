"""Chats through a real uvicorn: streams, whole answers, usage, and every error that comes before a header."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from services.gateway.engine_errors import EngineRejected, NoEngine, RequestTooLarge
from services.gateway.sessions.records import SessionHint
from services.settings import ByteSize
from tests.gateway.fake_engines import END, MODEL, START, FakeEngines, bundle, card
from tests.gateway.http_gateway import HELLO, content, events, gateway

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
PROMPT = [START, *b"user\nHello", END, *b"\n", START, *b"assistant\n"]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_stream_from_its_first_event_to_done() -> None:
    async with gateway(FakeEngines().says("Hi 😊")) as g:
        response = await g.chat(stream=True)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        call = g.engines.calls[0]
        assert response.headers["x-request-id"] == call.stream.request_id
        chunks = events(response.text)
        assert content(chunks) == "Hi 😊"
        assert {(c["id"], c["object"], c["model"]) for c in chunks} == {
            (f"chatcmpl-{call.stream.request_id}", "chat.completion.chunk", MODEL)
        }
        choices = [c["choices"][0] for c in chunks]
        assert [c["delta"].get("role") for c in choices] == ["assistant", *[None] * (len(choices) - 1)]
        assert [c["finish_reason"] for c in choices] == [*[None] * (len(choices) - 1), "stop"]
        assert (call.model, call.prompt) == (MODEL, PROMPT)


async def test_a_whole_answer_has_the_text_of_the_stream() -> None:
    async with gateway(FakeEngines().says("Hi 😊", cached_device=3, cached_host=4, queue_seconds=0.5)) as g:
        streamed = content(events((await g.chat(stream=True)).text))
        response = await g.chat()
        assert response.headers["x-request-id"] == g.engines.calls[1].stream.request_id
        answer = response.json()
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hi 😊"}
        assert choice["message"]["content"] == streamed
        assert (choice["finish_reason"], answer["object"], answer["model"]) == ("stop", "chat.completion", MODEL)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(PROMPT)
        assert usage["completion_tokens"] == 8
        assert usage["total_tokens"] == len(PROMPT) + 8
        assert usage["prompt_tokens_details"] == {"cached_tokens": 7}
        assert (usage["samovar"]["cached_device"], usage["samovar"]["cached_host"]) == (3, 4)
        assert usage["samovar"]["queue_seconds"] == 0.5


@pytest.mark.parametrize("options", CASES["T21"]["input"]["requests"])
async def test_usage_comes_after_the_finish_where_it_was_asked_for(options: dict) -> None:
    engines = FakeEngines().says("x" * 12, "length", cached_device=5)
    async with gateway(engines) as g:
        chunks = events((await g.chat(**options)).text)
    if not options.get("stream_options"):
        assert all("usage" not in c and c["choices"] for c in chunks)
        return
    *_, last, usage = chunks
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == len(PROMPT)
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["usage"]["total_tokens"] == len(PROMPT) + 12
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert [c for c in chunks if "usage" in c] == [usage]


async def test_a_cold_run_reports_zero_cached_tokens() -> None:
    async with gateway(FakeEngines().says("x")) as g:
        usage = (await g.chat()).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_answer_and_the_engines_work(stream: bool) -> None:
    async with gateway() as g:
        asked = asyncio.create_task(g.chat(stream=stream, stop="own fox", stream_options={"include_usage": True}))
        call = await g.engines.called()
        call.say("The quick br")
        call.say("own")
        call.say(" fox jumps over")
        response = await asked
        assert call.cancelled.is_set()
        assert "own" not in response.text
        if stream:
            chunks = events(response.text)
            text, reason = content(chunks), chunks[-2]["choices"][0]["finish_reason"]
            usage = chunks[-1]["usage"]
        else:
            answer = response.json()
            text, reason = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
            usage = answer["usage"]
        assert (text, reason) == ("The quick br", "stop")
        assert usage["completion_tokens"] == len("The quick brown fox")
        assert usage["prompt_tokens_details"]["cached_tokens"] == 8
        assert await g.sample("disconnects_total", phase="decode") == 0


async def test_a_held_back_stop_prefix_is_released_at_the_end() -> None:
    async with gateway(FakeEngines().says("quick brown")) as g:
        assert content(events((await g.chat(stream=True, stop=["own fox"])).text)) == "quick brown"


async def test_headers_come_before_the_first_token_and_keepalives_until_then() -> None:
    async with gateway(keepalive=0.05) as g:
        request = g.http.build_request("POST", "/v1/chat/completions", json={**HELLO, "stream": True})
        sent = asyncio.create_task(g.http.send(request, stream=True))
        call = await g.engines.called()
        response = await asyncio.wait_for(sent, 5)  # nothing was said yet
        assert response.status_code == 200
        lines = (line async for line in response.aiter_lines() if line)
        for _ in range(2):
            quiet = json.loads((await anext(lines)).removeprefix("data: "))
            assert quiet["choices"] == []
            assert quiet["object"] == "chat.completion.chunk"
        call.say("now")
        call.finish()
        rest = [line async for line in lines]
        assert rest[-1] == "data: [DONE]"
        spoken = [c for c in (json.loads(line.removeprefix("data: ")) for line in rest[:-1]) if c["choices"]]
        assert spoken[0]["choices"][0]["delta"]["role"] == "assistant"
        assert content(spoken) == "now"


async def test_text_goes_out_as_it_comes_in_and_never_within_a_character() -> None:
    async with (
        gateway() as g,
        g.http.stream("POST", "/v1/chat/completions", json={**HELLO, "stream": True}) as response,
    ):
        call = await g.engines.called()
        lines = (line async for line in response.aiter_lines() if line)
        seen = []
        for piece, expected in ((b"Hi \xf0\x9f", "Hi "), (b"\x98\x8a", "😊"), (b"\xe4\xb8", None), (b"\x96ab", "世ab")):
            call.say(piece)
            while expected is not None and "".join(seen) != expected:
                seen += [json.loads((await anext(lines))[6:])["choices"][0]["delta"]["content"]]
            seen = [] if expected is not None else seen
        call.finish()
        assert [line async for line in lines][-1] == "data: [DONE]"


async def test_an_engine_error_in_a_stream_ends_it_without_a_fake_finish() -> None:
    async with gateway() as g:
        asked = asyncio.create_task(g.chat(stream=True))
        call = await g.engines.called()
        call.say("Half")
        call.finish("error", "The device is gone.")
        response = await asked
        assert response.status_code == 200
        *chunks, last = [json.loads(block[6:]) for block in response.text.split("\n\n")[:-1]]
        assert content(chunks) == "Half"
        assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
        assert last == {
            "error": {
                "message": "The device is gone.",
                "type": "server_error",
                "param": None,
                "code": "engine_error",
            }
        }
        assert await g.sample("finished_total", reason="error") == 1
        assert await g.sample("errors_total", type="engine_error") == 1


async def test_an_engine_error_of_a_whole_answer_is_a_500() -> None:
    async with gateway() as g:
        asked = asyncio.create_task(g.chat())
        call = await g.engines.called()
        call.say("Half")
        call.finish("error", "The device is gone.")
        error = error_of(await asked, 500)
        assert (error["message"], error["code"]) == ("The device is gone.", "engine_error")


async def test_a_bad_request_is_decided_before_the_headers_of_a_stream() -> None:
    async with gateway() as g:
        error = error_of(await g.chat(stream=True, temperature=-1), 400)
        assert (error["param"], error["type"]) == ("temperature", "invalid_request_error")
        response = await g.http.post("/v1/chat/completions", content=b"hello")
        assert error_of(response, 400)["code"] == "invalid_json"
        assert g.engines.calls == []


async def test_overflow_has_the_wording_that_agents_know() -> None:
    case = CASES["T20"]
    engines = FakeEngines([card(max_model_len=4096)], bundle("{{ messages[0].content }}"))
    async with gateway(engines) as g:
        messages = [{"role": "user", "content": "x" * case["input"]["prompt_tokens"]}]
        response = await g.chat(messages=messages, stream=True, max_tokens=512)
        assert error_of(response, 400) == case["expected"]["openai_body"]["error"]
        assert error_of(await g.chat(messages=messages), 400) == case["expected"]["openai_body"]["error"]
        # The prompt fits, the sum does not: clamped.
        engines.says("ok", "length")
        messages = [{"role": "user", "content": "x" * 4000}]
        assert (await g.chat(messages=messages, max_tokens=512)).status_code == 200
        assert engines.calls[0].sampling.max_tokens == 96


async def test_a_template_that_refuses_is_a_400_with_its_message() -> None:
    engines = FakeEngines(text_side=bundle("{{ raise_exception('Roles must alternate') }}"))
    async with gateway(engines) as g:
        error = error_of(await g.chat(), 400)
        assert "Roles must alternate" in error["message"]
        assert error["param"] == "messages"


async def test_models_that_are_not_served() -> None:
    async with gateway(FakeEngines([card("a/b"), card("c")]).says("x")) as g:
        error = error_of(await g.chat(model="nope"), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "`a/b`" in error["message"]
        assert "`c`" in error["message"]
        g.engines.names.add("nope")  # its engine was there before
        assert error_of(await g.chat(model="nope"), 503)["code"] == "server_is_overloaded"
        assert (await g.chat(model=None)).json()["model"] == "a/b"


async def test_without_an_engine_a_chat_is_a_503_that_says_what_is_missing() -> None:
    async with gateway(FakeEngines(cards=[])) as g:
        response = await g.chat(stream=True)
        error = error_of(response, 503)
        assert "no engine has been heard" in error["message"]
        assert error["code"] == "server_is_overloaded"
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (EngineRejected("overloaded", "The queue is full.", 2.3), 503, "server_is_overloaded", "3"),
        (EngineRejected("loading", "Still loading.", 0.2), 503, "server_is_overloaded", "1"),
        (EngineRejected("draining", "Going away.", 1.0), 503, "server_is_overloaded", "1"),
        (EngineRejected("context_length", "Too long.", 1.0), 400, "context_length_exceeded", None),
        (EngineRejected("bad_request", "No such token.", 1.0), 400, None, None),
        (NoEngine("No engine serves it."), 503, "server_is_overloaded", "1"),
        (RequestTooLarge(2_000_000, 1_048_576), 413, "request_too_large", None),
    ],
)
async def test_refusals_of_the_engine_come_before_the_headers(
    refusal: Exception, status: int, code: str | None, retry_after: str | None
) -> None:
    engines = FakeEngines()
    engines.refusal = refusal
    async with gateway(engines) as g:
        response = await g.chat(stream=True)
        assert error_of(response, status)["code"] == code
        assert response.headers.get("retry-after") == retry_after
        assert await g.sample("errors_total", type=code or "invalid_request_error") == 1
        page = await g.deps.sessions.sessions(10, 0)
        assert page.total in (0, 1)  # it has no turn, and nothing broke on recording it


async def test_a_fault_of_ours_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    engines = FakeEngines()
    engines.refusal = RuntimeError("secret detail")  # type: ignore[assignment]
    async with gateway(engines) as g:
        response = await g.chat()
        assert error_of(response, 500)["code"] == "internal_error"
        assert "secret" not in response.text
        assert "secret detail" in caplog.text


async def test_the_body_limit() -> None:
    async with gateway(FakeEngines().says("x"), body_limit=ByteSize(1000)) as g:
        error = error_of(await g.chat(messages=[{"role": "user", "content": "x" * 2000}]), 413)
        assert error["code"] == "request_too_large"
        assert "1000B" in error["message"]

        async def unannounced():
            for _ in range(20):
                yield b" " * 100

        assert error_of(await g.http.post("/v1/chat/completions", content=unannounced()), 413)
        assert (await g.chat()).status_code == 200


async def test_api_keys() -> None:
    async with gateway(FakeEngines().says("x"), api_keys=("right", "also-right")) as g:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}, {"Authorization": "Bearer"}):
            for response in (await g.chat(headers=headers), await g.http.get("/v1/models", headers=headers)):
                error = error_of(response, 401)
                assert error["code"] == "invalid_api_key"
                assert "Authorization: Bearer" in error["message"]
                assert response.headers["www-authenticate"] == "Bearer"
        assert (await g.http.get("/api/sessions")).status_code == 401
        for headers in (
            {"Authorization": "Bearer right"},
            {"authorization": "bearer also-right"},
            {"x-api-key": "right"},
        ):
            assert (await g.chat(headers=headers)).status_code == 200
            assert (await g.http.get("/api/sessions", headers=headers)).status_code == 200
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert (await g.http.get(path)).status_code == 200


async def test_without_keys_any_key_is_taken() -> None:
    async with gateway(FakeEngines().says("x")) as g:
        assert (await g.chat(headers={"Authorization": "Bearer not-needed"})).status_code == 200


async def test_models() -> None:
    async with gateway(FakeEngines([card("org/name", max_model_len=8192), card("other")])) as g:
        listed = (await g.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        first = listed["data"][0]
        assert first == {
            "id": "org/name",
            "object": "model",
            "type": "model",
            "display_name": "org/name",
            "created": 1_700_000_000,
            "created_at": "2023-11-14T22:13:20Z",
            "owned_by": "samovar",
            "max_model_len": 8192,
            "context_length": 8192,
        }
        assert [model["id"] for model in listed["data"]] == [
            "org/name",
            "other",
            "claude-org/name",
            "claude-other",
        ]
        assert (await g.http.get("/v1/models/org/name")).json() == first
        assert error_of(await g.http.get("/v1/models/nope"), 404)["code"] == "model_not_found"


async def test_health_names_what_is_missing() -> None:
    engines = FakeEngines()
    async with gateway(engines) as g:
        assert (await g.http.get("/health/live")).json()["status"] == "ok"
        assert (await g.http.get("/health/ready")).status_code == 200
        engines.missing = "engine engine-0 is loading (40%)"
        response = await g.http.get("/health/ready")
        assert response.status_code == 503
        assert response.json()["missing"] == "engine engine-0 is loading (40%)"
        assert (await g.http.get("/health/live")).status_code == 200
    assert engines.running == ["started", "closed"]


async def test_unknown_paths_and_methods_have_openais_shape() -> None:
    async with gateway() as g:
        assert error_of(await g.http.get("/v1/nothing"), 404)["code"] == "not_found"
        assert error_of(await g.http.get("/v1/chat/completions"), 405)["code"] == "method_not_allowed"
        error = error_of(await g.http.get("/api/sessions?limit=0"), 400)
        assert error["param"] == "limit"
        assert error["message"].startswith("limit: ")


async def test_metrics_count_what_happened() -> None:
    async with gateway(FakeEngines().says("Hello", cached_device=2, cached_host=1)) as g:
        await g.chat(stream=True)
        await g.chat()
        await g.chat(temperature=-1)
        route = "/v1/chat/completions"
        assert await g.sample("requests_total", route=route, status="200") == 2
        assert await g.sample("requests_total", route=route, status="400") == 1
        assert await g.sample("errors_total", type="invalid_request_error") == 1
        assert await g.sample("prompt_tokens_total") == 2 * len(PROMPT)
        assert await g.sample("output_tokens_total") == 2 * 6
        assert await g.sample("cached_tokens_total", tier="device") == 4
        assert await g.sample("cached_tokens_total", tier="host") == 2
        assert await g.sample("finished_total", reason="stop") == 2
        for name in ("time_to_first_token_seconds", "time_per_output_token_seconds", "request_seconds"):
            assert await g.sample(f"{name}_count") == 2
        assert await g.sample("streams_open") == 0
        g.engines.counters.migrations = 3
        assert await g.sample("migrations_total") == 3


async def test_sessions_salts_and_records(tmp_path: Path) -> None:
    async with gateway(FakeEngines().says("Hello"), database=str(tmp_path / "sessions.sqlite")) as g:
        await g.chat(session_id="mine", cache_salt="tenant")
        await g.chat(headers={"x-session-id": "from-header"})
        await g.chat(prompt_cache_key="key", user="ann")
        await g.chat(user="ann")
        await g.chat(temperature=-1)
        assert [call.session_id for call in g.engines.calls] == ["mine", "from-header", "key", "ann"]
        assert [call.cache_salt for call in g.engines.calls] == ["tenant", "", "", ""]
        assert await g.deps.sessions.flush(5)
        page = (await g.http.get("/api/sessions")).json()
        assert {s["id"]: s["turns"] for s in page["data"]} == {"mine": 1, "from-header": 1, "key": 1, "ann": 1}
        (request,) = (await g.http.get("/api/sessions/mine")).json()["requests"]
        assert request["id"] == g.engines.calls[0].stream.request_id
        assert (request["engine"], request["finish_reason"], request["status"]) == ("engine-0", "stop", 200)
        assert (request["prompt_tokens"], request["output_tokens"]) == (len(PROMPT), 6)
        assert error_of(await g.http.get("/api/sessions/none"), 404)["code"] == "session_not_found"


async def test_turns_of_an_unnamed_conversation_share_a_session() -> None:
    async with gateway(FakeEngines().says("Fine.")) as g:
        first = [{"role": "system", "content": "Be kind. " * 20}, {"role": "user", "content": "How are you? " * 10}]
        await g.chat(messages=first)
        await g.chat(messages=[*first, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Good"}])
        await g.chat(messages=[first[0], {"role": "user", "content": "Another question. " * 10}])
        one, two, three = (call.session_id for call in g.engines.calls)
        assert one == two != three
        assert g.deps.sessions.resolve(SessionHint(opening=b"", session_id="x"), []) == "x"


async def test_a_hundred_requests_at_once() -> None:
    async with gateway(FakeEngines().says("Hello")) as g:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=g.url, timeout=30, limits=limits, verify=False) as many:
            asked = [many.post("/v1/chat/completions", json={**HELLO, "stream": n % 2 == 0}) for n in range(100)]
            responses = await asyncio.gather(*asked)
        assert {response.status_code for response in responses} == {200}
        assert len({response.headers["x-request-id"] for response in responses}) == 100
        assert len(g.deps.open_answers) == 0
