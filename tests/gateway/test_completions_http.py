"""Raw completions, tokenize and detokenize, model discovery and CORS over HTTP."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.fake_engines import END, MODEL, START, FakeEngines, card
from tests.gateway.http_gateway import Gateway, events, gateway
from tests.gateway.tiny import tiny_engines

TEXT = "<think>\nHm\n</think>\n\n<tool_call>x</tool_call> Hi 😊"


def client(g: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{g.url}/v1", api_key="any", max_retries=0, timeout=10)


async def complete(g: Gateway, **fields: Any) -> httpx.Response:
    return await g.http.post("/v1/completions", json={"model": MODEL, "prompt": "Once", **fields})


async def test_a_completion_is_raw_on_both_sides() -> None:
    async with gateway(FakeEngines().says(TEXT, cached_device=2)) as g:
        whole = (await complete(g)).json()
        assert whole["object"] == "text_completion"
        assert whole["id"].startswith("cmpl-")
        assert whole["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
        assert whole["usage"]["prompt_tokens"] == 4
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        chunks = events((await complete(g, stream=True, stream_options={"include_usage": True})).text)
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == TEXT
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == (
            [],
            4 + whole["usage"]["completion_tokens"],
        )
        call = g.engines.calls[0]
        assert call.prompt == list(b"Once")
        assert call.sampling.max_tokens == 16


@pytest.mark.parametrize("prompt", ["Once", ["Once"], list(b"Once"), [list(b"Once")]])
async def test_spellings_of_a_prompt(prompt: object) -> None:
    async with gateway(FakeEngines().says("x")) as g:
        assert (await complete(g, prompt=prompt, max_tokens=5, stop="q")).status_code == 200
        assert g.engines.calls[0].prompt == list(b"Once")
        assert g.engines.calls[0].sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 258]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [{"text": "a"}]}, "prompt[0]"),
        ({"echo": True}, "echo"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 0}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_what_cannot_be_completed_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    async with gateway(FakeEngines().says("x")) as g:
        response = await complete(g, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


async def test_a_raw_prompt_over_the_context_is_refused() -> None:
    async with gateway(FakeEngines([card(max_model_len=64)])) as g:
        for prompt in ("x" * 64, [65] * 64):
            error = (await complete(g, prompt=prompt)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "64 tokens > 64 maximum" in error["message"]


async def test_the_openai_sdk_completes() -> None:
    async with gateway(FakeEngines().says("Hello, world")) as g, client(g) as sdk:
        whole = await sdk.completions.create(model=MODEL, prompt="Say", max_tokens=20)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hello, world", "stop")
        stream = await sdk.completions.create(model=MODEL, prompt="Say", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == "Hello, world"


async def test_tokenize_and_detokenize() -> None:
    text = "Hi 😊<|im_end|>"
    async with gateway(FakeEngines()) as g:
        for field in ("prompt", "content"):
            answer = (await g.http.post("/tokenize", json={field: text})).json()
            assert answer == {"tokens": [*"Hi 😊".encode(), END], "count": 8, "max_model_len": 4096}
        back = (await g.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert back == {"prompt": text, "content": text}
        assert (await g.http.post("/detokenize", json={"tokens": []})).json()["content"] == ""
        chat = {"messages": [{"role": "user", "content": "Hi"}], "model": MODEL}
        ids = (await g.http.post("/tokenize", json=chat)).json()["tokens"]
        assert ids == [START, *b"user\nHi", END, *b"\n", START, *b"assistant\n"]
        long = (await g.http.post("/tokenize", json={"prompt": "x" * 5000})).json()
        assert long["count"] == 5000
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [300]}, "tokens[0]"),
        ):
            response = await g.http.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        assert g.engines.calls == []


async def test_tokenize_counts_a_chat_as_it_is_sent() -> None:
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    body = {
        "model": "samovar-tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool],
        "enable_thinking": False,
    }
    async with gateway(tiny_engines().says("")) as g:
        counted = (await g.http.post("/tokenize", json=body)).json()["tokens"]
        await g.http.post("/v1/chat/completions", json=body)
        assert g.engines.calls[0].prompt == counted


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("claude-sonnet-4-5", "a/b"),
        ("claude-haiku-4-5-20251001", "a/b"),
        ("claude-c", "c"),
        ("main", "a/b"),
        ("", "a/b"),
        ("claude", None),
        ("gpt-x", None),
    ],
)
async def test_aliases(name: str, served: str | None) -> None:
    engines = FakeEngines([card("a/b"), card("c")]).says("x")
    async with gateway(engines, model_aliases=("claude-*", "main")) as g:
        response = await g.chat(model=name)
        if served is None:
            assert response.status_code == 404
        else:
            assert response.json()["model"] == served
        listed = [model["id"] for model in (await g.http.get("/v1/models")).json()["data"]]
        assert listed == ["a/b", "c", "claude-a/b", "claude-c", "main"]
        assert (await g.http.get("/v1/models/claude-c")).json()["display_name"] == "c"


async def test_a_model_that_is_gone_for_now_is_no_alias() -> None:
    engines = FakeEngines([card("a")]).says("x")
    engines.names.add("claude-own")
    async with gateway(engines) as g:
        assert (await g.chat(model="claude-own")).status_code == 503


async def test_discovery_by_other_servers_manners() -> None:
    async with gateway(FakeEngines([card(max_model_len=8192)]), api_keys=("key",)) as g:
        head = await g.http.head("/")
        assert (head.status_code, head.text) == (200, "")
        key = {"x-api-key": "key"}
        for path in ("/props", "/v1/props"):
            assert (await g.http.get(path)).status_code == 401
            props = (await g.http.get(path, headers=key)).json()
            assert props["default_generation_settings"]["n_ctx"] == 8192
            assert props["modalities"]["vision"] is False
        for path in ("/models?client_version=0.171.0", "/v1/models?client_version=0.171.0"):
            (model,) = (await g.http.get(path, headers=key)).json()["models"]
            assert (model["slug"], model["context_window"]) == (MODEL, 8192)
        listed = (await g.http.get("/v1/models?limit=1000", headers=key)).json()
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, f"claude-{MODEL}")
    async with gateway(FakeEngines([])) as g:
        assert (await g.http.get("/v1/models")).json()["data"] == []
        assert (await g.http.get("/props")).status_code == 503


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:5173", True),
        ("http://127.0.0.1", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("null", False),
    ],
)
async def test_cors_and_its_preflight_need_no_key(origin: str, allowed: bool) -> None:
    async with gateway(FakeEngines().says("Hi"), api_keys=("key",)) as g:
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type, x-session-id",
        }
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/completions"):
            preflight = await g.http.options(path, headers=asked)
            if allowed:
                assert preflight.status_code in (200, 204)
                assert preflight.headers["access-control-allow-origin"] == origin
                headers = preflight.headers["access-control-allow-headers"].lower()
                assert {"authorization", "content-type", "x-session-id"} <= {h.strip() for h in headers.split(",")}
            else:
                assert "access-control-allow-origin" not in preflight.headers
        for stream in (True, False):
            response = await g.chat({"Origin": origin, "Authorization": "Bearer key"}, stream=stream)
            assert response.status_code == 200
            assert response.headers.get("access-control-allow-origin") == (origin if allowed else None)
        refused = await g.chat({"Origin": origin})
        assert refused.status_code == 401
        assert refused.headers.get("access-control-allow-origin") == (origin if allowed else None)


@pytest.mark.parametrize(
    ("headers", "body", "session", "parent"),
    [
        ({"x-claude-code-session-id": "c", "thread-id": "t", "x-session-id": "s"}, {}, "c", None),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}, {}, "c/a", "c"),
        (
            {
                "x-claude-code-session-id": "c",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            {},
            "c/b",
            "c/a",
        ),
        ({"session-id": "s", "thread-id": "t"}, {"prompt_cache_key": "k"}, "t", None),
        ({"session-id": "s", "x-codex-parent-thread-id": "p"}, {}, "s", "p"),
        ({"X-Session-Id": "o", "x-session-affinity": "o", "x-parent-session-id": "p"}, {}, "o", "p"),
        ({"x-session-affinity": "o"}, {"prompt_cache_key": "k"}, "o", None),
        ({"x-parent-session-id": "p"}, {"user": "u"}, "u", None),
        ({}, {"promptCacheKey": "camel", "user": "u"}, "camel", None),
        ({}, {"prompt_cache_key": "snake", "promptCacheKey": "camel"}, "snake", None),
        ({"x-session-id": "o", "x-parent-session-id": "p"}, {"session_id": "own"}, "own", None),
    ],
)
async def test_marks_of_clients_name_sessions(
    headers: dict[str, str], body: dict[str, Any], session: str, parent: str | None
) -> None:
    async with gateway(FakeEngines().says("Hi")) as g:
        # An agent's own requests have tools: see test_standing.py for those that have none.
        tools = [{"type": "function", "function": {"name": "read"}}]
        assert (await g.chat(headers, tools=tools, **body)).status_code == 200
        assert g.engines.calls[0].session_id == session
        assert await g.deps.sessions.flush(5)
        (found,) = (await g.http.get("/api/sessions")).json()["data"]
        assert (found["id"], found["parent"]) == (session, parent)


async def test_half_a_character_in_a_completion() -> None:
    async with gateway(FakeEngines().says(b"\xf0\x9f", "length")) as g:
        chunks = events((await complete(g, stream=True)).text)
        assert "".join(c["choices"][0]["text"] for c in chunks) == "�"
        assert json.dumps(chunks)
