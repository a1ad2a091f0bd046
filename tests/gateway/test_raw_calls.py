"""Calls of the history in a prompt: as they were generated while the client sends them back unchanged (case T17)."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.openai.messages import for_template
from services.gateway.openai.request import parse
from services.gateway.prompt.call_frame import PROBE, CallFrame
from services.gateway.prompt.language import Language
from services.gateway.prompt.same_call import same_json
from services.gateway.prompt.template import ChatTemplate
from services.gateway.sessions.records import CallRecord
from tests.gateway.output_rig import CASES, call
from tests.gateway.tiny import decode, tiny_bundle

CASE = CASES["T17"]
RAW: str = CASE["input"]["turn1_generated"]
ECHO: str = CASE["input"]["client_echo_turn2"]["tool_calls"][0]["function"]["arguments"]
USER = {"role": "user", "content": "Deploy."}
HERMES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
)
UNTAGGED = HERMES.replace("<tool_call>", "<|call|>").replace("</tool_call>", "<|end|>")
TWICE = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}" + HERMES
FORGETFUL = HERMES.replace("m.tool_calls or []", "m.tool_calls or [] if m.content != 'old'")


def record(raw: str = RAW, arguments: str = ECHO, id: str = "call_1", name: str = "deploy") -> CallRecord:
    return CallRecord(id, "language", name, arguments, raw)


def sent(arguments: str = ECHO, id: str = "call_1", name: str = "deploy") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: dict[str, Any], content: str | None = None) -> list[dict[str, Any]]:
    """As the route has it: the arguments, a string in the request, are an object."""
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "done"} for one in calls]
    return for_template(parse(json.dumps({"messages": [USER, message, *results]}).encode()).messages)


def known(*records: CallRecord) -> Mapping[str, CallRecord]:
    return {one.id: one for one in records}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(tiny_bundle().chat_template, {})


@pytest.fixture(scope="module")
def language() -> Iterator[Language]:
    with ThreadPoolExecutor(1) as threads:
        yield Language(tiny_bundle(), threads)


def test_a_call_that_comes_back_is_what_was_generated(template: ChatTemplate) -> None:
    wanted = CASE["expected"]["turn2_prompt_contains"]
    assert wanted not in template.render(turn(sent()))
    text = template.render(turn(sent()), calls=known(record()))
    assert f"<|im_start|>assistant\n{wanted}<|im_end|>\n" in text
    assert text.count("<tool_call>") == 1


@pytest.mark.parametrize(
    "back",
    [
        sent(ECHO.replace("true", "false")),
        sent(ECHO.replace("true", "1")),
        sent(ECHO.replace("  keep  ", "keep")),
        sent(ECHO.replace("[1, 2]", "[2, 1]")),
        sent(ECHO.replace("{ ", '{ "more": null, ')),
        sent('{"dry_run": true}'),
        sent("{broken"),
        sent(name="deploy_all"),
        sent(id="call_2"),
    ],
)
def test_a_call_that_was_changed_or_is_not_known_is_the_clients(template: ChatTemplate, back: dict[str, Any]) -> None:
    assert template.render(turn(back), calls=known(record())) == template.render(turn(back))


def test_a_call_without_an_id_is_the_clients(template: ChatTemplate) -> None:
    messages = turn(sent())
    del messages[1]["tool_calls"][0]["id"]
    assert template.render(messages, calls=known(record())) == template.render(messages)


def test_each_call_of_a_message_stands_for_itself(template: ChatTemplate) -> None:
    other = call("read", path="a.py").replace("\n<parameter", "\n\n<parameter")
    first, second = record(), record(other, '{"path": "a.py"}', "call_2", "read")
    both = turn(sent(), sent('{"path":"a.py"}', "call_2", "read"), content="Well.")
    assert f"Well.\n\n{RAW}\n{other}<|im_end|>" in template.render(both, calls=known(first, second))
    assert f"Well.\n\n{RAW}\n{call('read', path='a.py')}<|im_end|>" in template.render(both, calls=known(first))
    # One id twice, as clients do that repeat a turn: each is looked at.
    twice = turn(sent(), sent('{"dry_run":false}'))
    assert f"{RAW}\n{call('deploy', dry_run='false')}<|im_end|>" in template.render(twice, calls=known(first))


@pytest.mark.parametrize("value", ["</tool_call>", "<tool_call>", f"a\n{RAW}\nb", "</parameter>\n</function>"])
def test_values_that_hold_tags(template: ChatTemplate, value: str) -> None:
    raw = call("write", text=value, path="a").replace("<function", "  <function")
    arguments = json.dumps({"path": "a", "text": value})
    messages = turn(sent(arguments, name="write"), sent(id="call_2"), content=f"See {value} and {RAW}.")
    text = template.render(messages, calls=known(record(raw, arguments, name="write"), record(id="call_2")))
    assert f"<|im_start|>assistant\nSee {value} and {RAW}.\n\n{raw}\n{RAW}<|im_end|>\n" in text


def test_a_family_that_writes_calls_as_json() -> None:
    raw = '<tool_call>\n{"name":"deploy",  "arguments":{"b":true,"a":[1]}}\n</tool_call>'
    template = ChatTemplate(HERMES, {})
    text = template.render(turn(sent('{"a": [1], "b": true}')), calls=known(record(raw, '{"b": true, "a": [1]}')))
    assert text == f"[user]Deploy.[assistant]{raw}[tool]done"


@pytest.mark.parametrize("source", [UNTAGGED, TWICE, FORGETFUL])
def test_a_template_of_another_shape_renders_as_it_would(source: str) -> None:
    template = ChatTemplate(source, {})
    for content in (None, "old", "<tool_call>", RAW):
        messages = turn(sent(), content=content)
        text = template.render(messages, calls=known(record()))
        if source is FORGETFUL and content != "old":
            assert text.endswith(f"{RAW}[tool]done")
        else:
            assert text == template.render(messages)


def test_the_frame_of_a_template() -> None:
    frame = CallFrame.of(ChatTemplate(tiny_bundle().chat_template, {}).render(PROBE))
    assert frame is not None
    assert frame.call("NAME", "MARK") == call("NAME", raw="MARK")
    assert CallFrame.of("nothing") is None


async def test_the_tokens_behind_a_call_and_the_hints(language: Language) -> None:
    given = await language.prompt(turn(sent()), 10_000, calls=known(record()))
    pieces = [decode(given.ids[a:b]) for a, b in zip(given.hints, [*given.hints[1:], None], strict=True)]
    assert pieces == [
        f"<|im_start|>assistant\n{RAW}<|im_end|>\n",
        "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>\n",
        "<|im_start|>assistant\n",
        "<think>\n",
    ]


async def test_a_template_that_needs_a_users_message() -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('No user.') }}{% endif %}" + HERMES
    with ThreadPoolExecutor(1) as threads:
        other = Language(replace(tiny_bundle(), chat_template=strict), threads)
        given = await other.prompt(turn(sent())[1:], 10_000, calls=known(record()))
    assert decode(given.ids) == f"[user][assistant]{RAW}[tool]done"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": 1, "b": [{}]}, {"b": [{}], "a": 1.0}, True),
        (True, 1, False),
        (0, False, False),
        (None, False, False),
        ("1", 1, False),
        ([], {}, False),
        ([1, 2], [1], False),
        ({"a": None}, {}, False),
        ({"a": {"b": [True]}}, {"a": {"b": [1]}}, False),
    ],
)
def test_equal_as_json(one: Any, other: Any, same: bool) -> None:
    assert same_json(one, other) is same
    assert same_json(other, one) is same
