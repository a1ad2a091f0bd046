"""Chats of the family through its own template: history in all its spellings, tools, thinking, reminders, hints."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.openai.chat_response import ChatResponse
from services.gateway.openai.messages import for_template
from services.gateway.openai.request import parse
from services.gateway.openai.tools import function_tools
from services.gateway.output.parser import OutputParser
from services.gateway.output.tool_arguments import Tools
from services.gateway.prompt.conversation import with_reminders
from services.gateway.prompt.language import Language, Prompt
from services.gateway.prompt.template import ChatTemplate, TemplateFailed
from services.gateway.renderer import Cost, Ending
from services.gateway.thinking import template_variables
from services.protocol.generate import Usage
from tests.gateway.fake_engines import TEMPLATE
from tests.gateway.tiny import decode, tiny_bundle

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}, "strict": True}}
OPEN_SUFFIX = "<|im_start|>assistant\n<think>\n"
CLOSED_SUFFIX = OPEN_SUFFIX + "\n</think>\n\n"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def language() -> Iterator[Language]:
    with ThreadPoolExecutor(1) as threads:
        yield Language(tiny_bundle(), threads)


async def prompt(language: Language, *messages: dict[str, Any], **fields: Any) -> Prompt:
    chat = parse(json.dumps({"messages": messages, **fields}).encode())
    return await language.prompt(
        for_template(chat.messages),
        100_000,
        tools=function_tools(chat.tools or ()),
        variables=template_variables(chat),
    )


async def text(language: Language, *messages: dict[str, Any], **fields: Any) -> str:
    return decode((await prompt(language, *messages, **fields)).ids)


async def test_thinking_shows_in_the_tail_of_the_prompt(language: Language) -> None:
    for fields in ({}, {"enable_thinking": True}, {"reasoning_effort": "low"}):
        on = await prompt(language, USER, **fields)
        assert decode(on.ids) == f"<|im_start|>user\nHi<|im_end|>\n{OPEN_SUFFIX}"
        assert (on.opens_thoughts, on.thinking) == (True, True)
    for fields in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        off = await prompt(language, USER, **fields)
        assert decode(off.ids) == f"<|im_start|>user\nHi<|im_end|>\n{CLOSED_SUFFIX}"
        assert (off.opens_thoughts, off.thinking) == (False, False)


async def test_a_tag_in_a_message_opens_nothing(language: Language) -> None:
    asked = await prompt(language, {"role": "user", "content": "What is <think>"}, enable_thinking=False)
    assert not asked.opens_thoughts


@pytest.mark.parametrize(
    ("source", "variables", "opens", "thinking"),
    [
        ("{{ enable_thinking }}x", {}, False, True),
        ("{{ enable_thinking }}x", {"enable_thinking": False}, False, False),
        ("x", {"enable_thinking": False}, False, None),
        ("x<think>", {}, True, True),
        ("x<think>\n", {}, True, True),
        ("x<think>\n\n</think>\n\n", {}, False, False),
    ],
)
async def test_templates_that_leave_the_tag_to_the_model_or_know_no_thinking(
    source: str, variables: dict[str, Any], opens: bool, thinking: bool | None
) -> None:
    with ThreadPoolExecutor(1) as threads:
        other = Language(replace(tiny_bundle(), chat_template=source), threads)
        given = await other.prompt([USER], 100, variables=variables)
    assert (given.opens_thoughts, given.thinking) == (opens, thinking)


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "Yes", **fields}


THOUGHTFUL = [
    answer(reasoning_content="Hm."),
    answer(reasoning="Hm."),
    answer(thinking="Hm."),
    answer(reasoning="Hm.", reasoning_content="Hm."),
    answer(reasoning="", reasoning_content="Hm.", thinking=None),
    answer(reasoning_content="Hm.\n"),
    answer(reasoning="Hm.", content=[{"type": "text", "text": "Yes"}]),
    answer(content=[{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes"}]),
    answer(content=[{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Yes"}]),
]


@pytest.mark.parametrize("message", THOUGHTFUL)
async def test_thoughts_of_old_turns_render_alike_under_every_name(language: Language, message: dict) -> None:
    rendered = await text(language, USER, message, USER)
    assert "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes<|im_end|>\n" in rendered


CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py", "lines": [1, 2]}'}}
RENDERED_CALL = (
    "<tool_call>\n<function=read>\n<parameter=path>\na.py\n</parameter>\n<parameter=lines>\n[1, 2]\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize("content", [" ", "", None, "\n", [], [{"type": "text", "text": ""}]])
async def test_empty_content_beside_calls_renders_alike(language: Language, content: object) -> None:
    rendered = await text(language, USER, {"role": "assistant", "content": content, "tool_calls": [CALL]}, USER)
    assert f"<|im_start|>assistant\n{RENDERED_CALL}<|im_end|>\n" in rendered


async def test_calls_and_results_of_the_history(language: Language) -> None:
    results = [{"role": "tool", "tool_call_id": "1", "content": content} for content in ("one", "two")]
    rendered = await text(language, USER, answer(tool_calls=[CALL, CALL]), *results, tools=[TOOL])
    assert f"assistant\nYes\n\n{RENDERED_CALL}\n{RENDERED_CALL}<|im_end|>\n" in rendered
    assert (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>" in rendered
    )
    parts = [{**result, "content": [{"type": "text", "text": result["content"]}]} for result in results]
    assert rendered == await text(language, USER, answer(tool_calls=[CALL, CALL]), *parts, tools=[TOOL])


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        ({"path": "a"}, "<parameter=path>\na\n</parameter>\n"),
        ("", ""),
        (None, ""),
        ("{}", ""),
        ('{"path": ', '<parameter=arguments>\n{"path": \n</parameter>\n'),
        ('{"half": "\\ud83d"}', "<parameter=half>\n?\n</parameter>\n"),
        ("[1]", "<parameter=arguments>\n[1]\n</parameter>\n"),
    ],
)
async def test_arguments_of_the_history(language: Language, arguments: object, parameters: str) -> None:
    call = {"id": "1", "function": {"name": "read", "arguments": arguments}}
    rendered = await text(language, USER, answer(tool_calls=[call]))
    assert f"<function=read>\n{parameters}</function>" in rendered


async def test_tools_stand_before_the_system_text_as_they_came(language: Language) -> None:
    rendered = await text(language, SYSTEM, USER, tools=[TOOL, {"type": "web_search"}])
    assert rendered.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in rendered
    assert rendered.index("</tools>") < rendered.index("Be brief.") < rendered.index("<|im_end|>")


async def test_late_system_messages_stay_in_place_as_reminders(language: Language) -> None:
    late = {"role": "developer", "content": "Stay calm."}
    before = await prompt(language, SYSTEM, USER, answer(), USER)
    after = await prompt(language, SYSTEM, USER, answer(), USER, late)
    reminder = "<|im_start|>user\n<system-reminder>\nStay calm.\n</system-reminder><|im_end|>\n"
    assert decode(after.ids) == decode(before.ids).replace(OPEN_SUFFIX, reminder + OPEN_SUFFIX)
    # What was read before is not read again.
    assert after.ids[: before.hints[-2]] == before.ids[: before.hints[-2]]


def test_leading_system_messages_become_one() -> None:
    more = {"role": "system", "content": "Be kind."}
    late = {"role": "user", "content": "<system-reminder>\nBe kind.\n</system-reminder>"}
    both = {"role": "system", "content": "Be brief.\n\nBe kind."}
    assert with_reminders([SYSTEM, more, USER, more]) == [both, USER, late]
    assert with_reminders([SYSTEM]) == [SYSTEM]
    assert with_reminders([USER]) == [USER]


def test_a_template_that_knows_late_system_messages_gets_them() -> None:
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant" in ChatTemplate(TEMPLATE, {}).render(
        [USER, SYSTEM]
    )
    assert ChatTemplate(STRICT, {}).render([SYSTEM, USER, SYSTEM]) == (
        "[system]Be brief.[user]Hi[user]<system-reminder>\nBe brief.\n</system-reminder>"
    )


def test_system_text_alone_is_rendered_up_to_the_question() -> None:
    """As agents send it to warm the cache; the real family's template refuses a chat without a user's message."""
    template = ChatTemplate(
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No user query found in messages.') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
        {},
    )
    assert template.render([SYSTEM]) == "[system]Be brief.[user]"
    assert template.render([SYSTEM, USER]) == "[system]Be brief.[user]Hi"
    never = ChatTemplate("{{ raise_exception('No.' ~ messages | length) }}", {})
    with pytest.raises(TemplateFailed, match=r"No\.1"):
        never.render([SYSTEM])


async def test_a_template_that_raises_says_why(language: Language) -> None:
    with pytest.raises(TemplateFailed, match="failed"):
        await language.prompt([{"role": "user", "content": None}], 100)


def test_variables_hide_nothing_of_the_renderers() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ eos_token }}{{ extra }}", {"eos_token": "E"})
    assert template.render([USER], (), {"messages": [], "eos_token": "x", "extra": "!"}) == "HiE!"
    assert template.variables == {"messages", "eos_token", "extra"}


async def test_hints_are_the_boundaries_of_messages(language: Language) -> None:
    given = await prompt(language, SYSTEM, USER, answer(reasoning="Hm."), USER, tools=[TOOL])
    pieces = [decode(given.ids[a:b]) for a, b in zip(given.hints, [*given.hints[1:], None], strict=True)]
    assert pieces == [
        "<|im_start|>user\nHi<|im_end|>\n",
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n",
        "<|im_start|>assistant\n",
        "<think>\n",
    ]


@pytest.mark.parametrize("thinking", [True, False])
async def test_the_next_turn_parts_from_this_one_at_a_hint(language: Language, thinking: bool) -> None:
    """The history leaves the think block out, so the prompts part before its tag: a state kept at the end of the
    first prompt would be of no use."""
    first = await prompt(language, USER, enable_thinking=thinking)
    second = await prompt(language, USER, answer(), {"role": "user", "content": "Bye"}, enable_thinking=thinking)
    common = next(at for at, (a, b) in enumerate(zip(first.ids, second.ids, strict=False)) if a != b)
    assert common in first.hints
    assert decode(first.ids[:common]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "said",
    [
        "Hm.\n</think>\n\nYes.",
        f"Hm.\nHm.\n</think>\n\n{RENDERED_CALL}",
        f"Hm.\n</think>\n\nLet me see.\n\n{RENDERED_CALL}\n{RENDERED_CALL}",
    ],
)
async def test_an_answer_that_comes_back_is_the_tokens_that_were_generated(language: Language, said: str) -> None:
    """So that the next turn finds all of this one in the cache."""
    asked = await prompt(language, USER, tools=[TOOL])
    generated = language.encode(said + "<|im_end|>")
    parser = OutputParser(language.token_bytes, thinking=asked.opens_thoughts, tools=Tools([TOOL]))
    pieces = [*parser.feed(generated), *parser.finish()]
    answered = json.loads(
        ChatResponse("id", "model", 0, False).whole(
            pieces, Ending("stop"), Cost(Usage(prompt_tokens=1, output_tokens=1), 0)
        )
    )
    message = answered["choices"][0]["message"]
    following = await prompt(language, USER, message, {"role": "user", "content": "Go on."}, tools=[TOOL])
    assert following.ids[: len(asked.ids) + len(generated)] == asked.ids + generated
