"""A model's chat template: jinja in a sandbox, with the helpers that `transformers` gives to templates."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.prompt.call_frame import PROBE, CallFrame
from services.gateway.prompt.conversation import with_question, with_reminders
from services.gateway.prompt.marked import Part, marked
from services.gateway.prompt.written_answer import WrittenAnswer
from services.gateway.sessions.records import CallRecord


class TemplateFailed(ValueError):
    """The template refused the messages, or broke on them; the message says why."""


class _Generation(Extension):
    """`{% generation %}`, by which some templates mark what a trainer learns from: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter it escapes no HTML: the text goes to a model, which learned it unescaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    return environment


_GLOBALS: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

_LATE = "a-late-system-message"
_PROBE = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "system", "content": _LATE},
    {"role": "user", "content": "c"},
)


def reserved(name: str) -> bool:
    """Whether a variable is the renderer's own, so that a request must not set it."""
    return name in ("messages", "tools", "add_generation_prompt", *_GLOBALS) or name.endswith("_token")


class ChatTemplate:
    """Compiled once, rendered from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: `bos_token`, `eos_token`, ... as the template names them. Raises TemplateFailed when
        `source` is empty or no jinja."""
        if not source:
            raise TemplateFailed("this model has no chat template, so it cannot be used for chat")
        environment = _environment()
        try:
            self._template = environment.from_string(source, globals=_GLOBALS)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            """What the template asks for, `enable_thinking` for one."""
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        calls: Mapping[str, CallRecord] | None = None,
    ) -> str:
        """The prompt's text, up to where the assistant's answer begins. `variables`: the request's own, which can
        hide none of the others. System messages that the template would refuse or leave out, since they stand in the
        middle, are rendered in place as reminders of the user's. `calls`: generated ones by id; those that come back
        unchanged stand in the text as they were generated. Raises TemplateFailed."""
        return "".join(part for part in self.parts(messages, tools, variables, calls) if isinstance(part, str))

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        calls: Mapping[str, CallRecord] | None = None,
        answers: Mapping[int, WrittenAnswer] | None = None,
    ) -> list[Part]:
        """As `render`, in texts with the ids of answers between them. `answers`: what was generated for messages, by
        their places; it stands there where the template would show all of it. Raises TemplateFailed."""
        variables = variables or {}
        calls = calls if calls and self._call_frame is not None else {}
        answers = answers or {}
        while (marks := marked(messages, calls, answers)).marks:
            try:
                written = marks.written(self._whole(marks.messages, tools, variables), self._call_frame)
            except TemplateFailed:  # which the messages as they are may not do
                written = None
            if written is None and not answers:
                break
            refused = answers.keys() if written is None else written[1]
            if written is not None and not refused:
                return written[0]
            # Once or twice: what a template hides, as the thoughts before the last question, it hides throughout.
            answers = {place: answer for place, answer in answers.items() if place not in refused}
        return [self._whole(messages, tools, variables)]

    def _whole(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        if not self._late_system:
            messages = with_reminders(messages)
        try:
            return self._render(messages, tools, variables)
        except TemplateFailed:
            if any(message["role"] == "user" for message in messages):
                raise
            # Agents warm the cache with tools and system text alone, which some templates refuse. With an empty
            # question behind them the tokens up to it are those of the chats that will follow.
            try:
                return self._render(with_question(messages), tools, variables)
            except TemplateFailed:
                pass
            raise

    @cached_property
    def _late_system(self) -> bool:
        """Whether a system message in the middle gets into the prompt."""
        try:
            return _LATE in self._render(_PROBE, (), {})
        except TemplateFailed:
            return False

    @cached_property
    def _call_frame(self) -> CallFrame | None:
        """How the template writes a call; None where it is not between the tags of calls."""
        try:
            return CallFrame.of(self._whole(PROBE, (), {}))
        except TemplateFailed:
            return None

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        try:
            text = self._template.render(
                {
                    **variables,
                    **self._special_tokens,
                    "messages": messages,
                    "tools": list(tools) or None,
                    "add_generation_prompt": True,
                }
            )
            # JSON can write half of a surrogate pair, in a call's arguments for one, and no tokenizer takes it.
            return text if text.isascii() else text.encode("utf-8", "replace").decode()
        except jinja2.TemplateError as error:
            raise TemplateFailed(str(error) or type(error).__name__) from error
        except Exception as error:  # a template is a program of the model's file and may fail in any way
            raise TemplateFailed(f"the model's chat template failed: {error}") from error
