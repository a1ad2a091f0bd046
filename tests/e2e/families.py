"""One question to the API families, streamed and whole, and what came of it in the same words."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.gateway.http_gateway import events
from tests.gateway.responses_rig import Events
from tests.gateway.test_family_http import merge_calls
from tests.gateway.test_messages_http import assemble, sse

Tools = dict[str, dict[str, Any]]
"""Schemas of parameters by tool."""


@dataclass(frozen=True)
class Said:
    text: str
    calls: list[tuple[str, str]]
    """Names, and arguments as JSON; those of a streamed call that was cut as far as they came."""
    finish: str
    ids: frozenset[str]
    """Of the calls."""


def schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


async def chat(http: httpx.AsyncClient, text: str, tools: Tools, *, stream: bool, **fields: Any) -> Said:
    body = {
        "messages": [{"role": "user", "content": text}],
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema(properties)}}
            for name, properties in tools.items()
        ],
        "stream": stream,
        **fields,
    }
    response = await _post(http, "/v1/chat/completions", body)
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    if stream:
        finish = ""
        for chunk in events(response.text):
            for choice in chunk["choices"]:
                message["content"] += choice["delta"].get("content", "")
                merge_calls(message["tool_calls"], choice["delta"].get("tool_calls", []))
                finish = choice["finish_reason"] or finish
    else:
        (choice,) = response.json()["choices"]
        message, finish = message | choice["message"], choice["finish_reason"]
    calls = message["tool_calls"]
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return Said(message["content"], found, finish, frozenset(call["id"] for call in calls))


async def messages(http: httpx.AsyncClient, text: str, tools: Tools, *, stream: bool, **fields: Any) -> Said:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4000,
        "tools": [{"name": name, "input_schema": schema(properties)} for name, properties in tools.items()],
        "stream": stream,
        **fields,
    }
    response = await _post(http, "/v1/messages", body)
    message = assemble(sse(response.text), parse=False) if stream else response.json()
    blocks = [block for block in message["content"] if block["type"] == "tool_use"]
    calls = [(b["name"], b["input"] if stream else json.dumps(b["input"], ensure_ascii=False)) for b in blocks]
    content = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    return Said(content, calls, message["stop_reason"], frozenset(block["id"] for block in blocks))


async def responses(http: httpx.AsyncClient, text: str, tools: Tools, *, stream: bool, **fields: Any) -> Said:
    body = {
        "input": text,
        "tools": [
            {"type": "function", "name": name, "parameters": schema(properties)} for name, properties in tools.items()
        ],
        "stream": stream,
        **fields,
    }
    response = await _post(http, "/v1/responses", body)
    final = Events.of(response.text).final if stream else response.json()
    items = [item for item in final["output"] if item["type"] == "function_call"]
    parts = [part for item in final["output"] if item["type"] == "message" for part in item["content"]]
    calls = [(item["name"], item["arguments"]) for item in items]
    return Said("".join(p["text"] for p in parts), calls, final["status"], frozenset(i["call_id"] for i in items))


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response
