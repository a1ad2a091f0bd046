"""Answers that come back as history, over HTTP in every API family: the next prompt begins with the tokens of the last
one and those that the model chose, whatever a client made of them; and says nothing that the client did not say."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.gateway.fake_engines import Call, FakeEngines
from tests.gateway.http_gateway import Gateway, gateway
from tests.gateway.output_rig import call
from tests.gateway.responses_rig import TINY
from tests.gateway.tiny import decode, encode, tiny_bundle, tiny_card, tiny_engines

_SPECIAL = re.compile(r"(</?think>|</?tool_call>|<\|im_end\|>)")
ARGUMENTS = {"path": "a b.py", "text": "  x = {'é': 1}\n", "n": "2"}
RAW = call("write", **ARGUMENTS).replace("\n<parameter=text", "\n\n<parameter=text")
SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in ARGUMENTS}}
USER = "Write it."

SCRIPT = (
    f" First,  look\n   here. \n\n\n</think>\n\n\n Well: 😀 I see. \n\n{RAW}<|im_end|>",
    f"Now\nthe other.\n</think>\n\n{RAW}\n\n{RAW}<|im_end|>",
    f"\n</think>\n\n{RAW}<|im_end|>",
    "Thus it is done.\n\n</think>\n\n\n\nDone,  all of it. \n<|im_end|>",
    "And so on.\n</think>\n\nOn.<|im_end|>",
)
QWEN = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content | trim }}
    {%- for c in m.tool_calls or [] %}
        {{- ('\n\n' if loop.first and m.content | trim else '\n' if not loop.first else '') }}
        {{- '<tool_call>\n<function=' + c.function.name + '>\n' }}
        {%- for name, value in c.function.arguments | items %}
            {{- '<parameter=' + name + '>\n' + value | string + '\n</parameter>\n' }}
        {%- endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n<think>\n' + ('\n</think>\n\n' if enable_thinking is false else '') }}"""
"""As the family's: it shows the thoughts behind the last question only."""


def scattered(text: str) -> list[int]:
    """Other tokens than a tokenizer takes: one a character, as a model may choose them."""
    ids: list[int] = []
    for part in _SPECIAL.split(text):
        pieces = [part] if _SPECIAL.fullmatch(part) else list(part)
        ids += (id for piece in pieces for id in encode(piece))
    return ids


def acting(*script: str, engines: FakeEngines | None = None) -> FakeEngines:
    """Engines that say these answers, one a request."""
    engines = engines or tiny_engines()
    answers = iter(script)

    def play(asked: Call) -> None:
        ids = scattered(next(answers))
        asked._deliver(tuple(ids[:5]))
        asked._deliver(tuple(ids[5:]), "stop")

    engines.on_call = play
    return engines


def follows(engines: FakeEngines, turn: int) -> bool:
    """Whether the prompt behind a turn begins with that turn's prompt and answer."""
    before, after = engines.calls[turn], engines.calls[turn + 1]
    whole = [*before.prompt, *before.stream.output]
    return after.prompt[: len(whole)] == whole


Change = Callable[[str, Any], Any]
"""What a client does to a part of an answer: kind (`thoughts`, `text`, `arguments`) and value; None drops it."""


def exactly(kind: str, value: Any) -> Any:
    return value


def in_another_order(kind: str, value: Any) -> Any:
    return dict(sorted(value.items(), reverse=True)) if kind == "arguments" else value


def without_thoughts(kind: str, value: Any) -> Any:
    return None if kind == "thoughts" else value


def stripped(kind: str, value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def wrapped_anew(kind: str, value: Any) -> Any:
    return "\n ".join(value.split()) if kind == "thoughts" else value


Ask = Callable[[Gateway, list[Any], Change], Awaitable[list[Any]]]
"""Asks with this history in one family's form, and gives it back with the answer, as the client changed it, and the
results of its calls."""


async def chat(g: Gateway, history: list[Any], change: Change, **more: Any) -> list[Any]:
    tools = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]
    messages = history or [{"role": "user", "content": USER}]
    response = await g.chat(model=TINY, messages=messages, tools=tools, **more)
    message = response.json()["choices"][0]["message"]
    message["reasoning_content"] = change("thoughts", message.pop("reasoning_content", None) or "")
    message.pop("reasoning", None)
    message["content"] = change("text", message["content"] or "")
    results = []
    for one in message.get("tool_calls") or ():
        arguments = change("arguments", json.loads(one["function"]["arguments"]))
        one["function"]["arguments"] = json.dumps(arguments, indent=1)
        results.append({"role": "tool", "tool_call_id": one["id"], "content": "done"})
    return [*messages, message, *(results or [{"role": "user", "content": "And?"}])]


async def messages(g: Gateway, history: list[Any], change: Change) -> list[Any]:
    body = {
        "max_tokens": 1000,
        "tools": [{"name": "write", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive"},
        "messages": history or [{"role": "user", "content": USER}],
    }
    blocks, results = [], []
    for block in (await g.http.post("/v1/messages", json=body)).json()["content"]:
        match block["type"]:
            case "thinking":
                block["thinking"] = change("thoughts", block["thinking"])
            case "text":
                block["text"] = change("text", block["text"])
            case "tool_use":
                block["input"] = change("arguments", block["input"])
                results.append({"type": "tool_result", "tool_use_id": block["id"], "content": "done"})
        if None in block.values():  # as some servers give thoughts, and as some clients send them back
            block = {"type": "redacted_thinking", "data": "opaque"}
        blocks.append(block)
    answer = {"role": "assistant", "content": blocks}
    return [*body["messages"], answer, {"role": "user", "content": results or "And?"}]


async def responses(g: Gateway, history: list[Any], change: Change) -> list[Any]:
    items = history or [{"role": "user", "content": USER}]
    body = {"input": items, "tools": [{"type": "function", "name": "write", "parameters": SCHEMA}], "store": False}
    output, results = [], []
    for item in (await g.http.post("/v1/responses", json=body)).json()["output"]:
        match item["type"]:
            case "reasoning":
                text = change("thoughts", item["content"][0]["text"] if item["content"] else "")
                item["content"] = [{"type": "reasoning_text", "text": text}] if text else []
                item["encrypted_content"] = None if text else "opaque"
            case "message":
                item["content"][0]["text"] = change("text", item["content"][0]["text"])
            case "function_call":
                item["arguments"] = json.dumps(change("arguments", json.loads(item["arguments"])))
                results.append({"type": "function_call_output", "call_id": item["call_id"], "output": "done"})
        output.append(item)
    return [*items, *output, *(results or [{"role": "user", "content": "And?"}])]


@pytest.mark.parametrize("change", [exactly, in_another_order, without_thoughts, stripped, wrapped_anew])
@pytest.mark.parametrize("ask", [chat, messages, responses])
async def test_each_prompt_begins_with_all_that_was_generated(ask: Ask, change: Change) -> None:
    async with gateway(acting(*SCRIPT)) as g:
        history: list[Any] = []
        for _ in SCRIPT:
            history = await ask(g, history, change)
        assert [follows(g.engines, turn) for turn in range(len(SCRIPT) - 1)] == [True] * (len(SCRIPT) - 1)
        assert "opaque" not in decode(g.engines.calls[-1].prompt)


def hiding() -> FakeEngines:
    return FakeEngines([tiny_card()], replace(tiny_bundle(), chat_template=QWEN))


async def test_thoughts_are_shown_where_the_template_shows_them() -> None:
    """Up to the answer to a question all is as it was generated; behind it the template leaves the thoughts out."""
    async with gateway(acting(*SCRIPT, engines=hiding())) as g:
        history: list[Any] = []
        for _ in SCRIPT:
            history = await chat(g, history, without_thoughts)
        assert [follows(g.engines, turn) for turn in range(len(SCRIPT) - 1)] == [True, True, True, False]
        last = decode(g.engines.calls[-1].prompt)
        assert "<think>" not in last.removesuffix("<|im_start|>assistant\n<think>\n")
        assert last.count(RAW) == 4, "calls are as they were generated all the same"


async def test_an_answer_without_thinking() -> None:
    """Its prompt has closed the thoughts, which the template writes into no history."""
    off = {"enable_thinking": False}
    async with gateway(acting(f"Well. \n{RAW}<|im_end|>", "Done.<|im_end|>")) as g:
        history = await chat(g, [], stripped, chat_template_kwargs=off)
        await chat(g, history, stripped, chat_template_kwargs=off)
        assert follows(g.engines, 0)


EDITS: dict[str, dict[str, Any]] = {
    "text": {"content": "Well: I see nothing."},
    "white space within": {"content": "Well: 😀\nI see."},
    "thoughts": {"reasoning_content": "First, look there."},
    "arguments": {"arguments": {**ARGUMENTS, "n": "3"}},
    "no call": {"tool_calls": None, "content": "Well, no."},
}


@pytest.mark.parametrize("edit", EDITS)
async def test_what_a_user_has_changed_is_the_users(edit: str) -> None:
    async with gateway(acting(SCRIPT[0], SCRIPT[3])) as g:
        history = await chat(g, [], exactly)
        message = history[1]
        changed = dict(EDITS[edit])
        if arguments := changed.pop("arguments", None):
            message["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
        message.update(changed)
        await chat(g, history, exactly)
        text = decode(g.engines.calls[1].prompt)
        for value in changed.values():
            assert value is None or value in text
        assert ("<parameter=n>\n3\n" in text) == bool(arguments)
        assert (RAW in text) == (edit not in ("arguments", "no call"))
        assert ("First,  look\n   here." in text) == (edit != "thoughts")


async def test_a_text_cut_by_its_user_keeps_the_tokens_before() -> None:
    async with gateway(acting(SCRIPT[3], SCRIPT[4])) as g:
        history = await chat(g, [], without_thoughts)
        history[1]["content"] = "Done,  al"
        await chat(g, history, exactly)
        first, second = g.engines.calls
        kept = [*first.prompt, *scattered("Thus it is done.\n\n</think>\n\n\n\nDone,  al")]
        assert second.prompt[: len(kept)] == kept
        assert decode(second.prompt[len(kept) :]).startswith("<|im_end|>\n")


async def test_another_conversation_and_another_tenant_get_nothing() -> None:
    """An answer in the same words, without its thoughts, after something else or of someone else."""
    async with gateway(acting(*[SCRIPT[3]] * 4)) as g:
        history = await chat(g, [], without_thoughts, cache_salt="one")
        other = [{"role": "user", "content": "Write that."}, *history[1:]]
        await chat(g, other, exactly, cache_salt="one")
        await chat(g, history, exactly, cache_salt="two")
        await chat(g, history, exactly, cache_salt="one")
        known = ["Thus it is done." in decode(asked.prompt) for asked in g.engines.calls]
        assert known == [False, False, False, True]


async def stopped_within(g: Gateway, body: dict[str, Any], ids: Sequence[int], end: int) -> tuple[str, str]:
    """Stops a stream when it has given `end` ids; its thoughts and its text. The engine has gone on for three ids."""
    said = {"reasoning_content": "", "content": ""}
    async with g.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        asked = await g.engines.called()
        asked._deliver(tuple(ids[:end]))
        lines = response.aiter_lines()
        wanted = "".join(decode(list(ids[:end])).replace("</think>", "").split())
        while "".join("".join(said.values()).split()) != wanted:
            line = await asyncio.wait_for(anext(lines), 5)
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    for field in said:
                        said[field] += choice["delta"].get(field) or ""
        g.engines.answer_cancel = False
        asked._deliver(tuple(ids[end : end + 3]))
    return said["reasoning_content"], said["content"]


@pytest.mark.parametrize(("end", "open"), [(13, True), (60, False)])
@pytest.mark.parametrize("answers_cancel", [True, False])
async def test_a_partial_answer_comes_back(end: int, open: bool, answers_cancel: bool) -> None:
    """A client that left sends what it has heard with its next question, even before the engine has said that it
    stopped."""
    ids = scattered("First,  look 😀 here and there.\n</think>\n\nWell: I see what is to be done.")
    engines = tiny_engines()
    async with gateway(engines) as g:
        body = {"model": TINY, "messages": [{"role": "user", "content": USER}]}
        thoughts, text = await stopped_within(g, body, ids, end)
        assert bool(text) != open
        first = engines.calls[0]
        if answers_cancel:
            await asyncio.wait_for(first.cancelled.wait(), 5)
            first.finish("cancel")
        engines.on_call = lambda asked: asked.finish()
        partial = {"role": "assistant", "reasoning_content": thoughts, "content": text}
        await g.chat(model=TINY, messages=[*body["messages"], partial, {"role": "user", "content": "No."}])
        second = engines.calls[1].prompt
        kept = [*first.prompt, *ids[:end]]
        assert second[: len(kept)] == kept
        closed = "" if not open else "\n</think>\n\n"
        assert decode(second[len(kept) :]).startswith(f"{closed}<|im_end|>\n<|im_start|>user\nNo.")
        if not answers_cancel:
            first.finish("cancel")


async def test_a_restarted_gateway_knows_the_answers(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    async with gateway(acting(SCRIPT[0]), path) as g:
        history = await chat(g, [], without_thoughts)
        (first,) = g.engines.calls
        assert await g.deps.sessions.flush(5)
    async with gateway(acting(SCRIPT[1], SCRIPT[2]), path) as g:
        await chat(g, history, exactly)
        whole = [*first.prompt, *first.stream.output]
        assert g.engines.calls[0].prompt[: len(whole)] == whole
        g.engines.cards[0] = replace(g.engines.cards[0], vocab_size=5000)
        await chat(g, history, exactly)
        assert g.engines.calls[1].prompt[: len(whole)] != whole, "another model's ids may be none of this one's"
