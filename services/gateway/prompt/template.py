"""A model's chat template: jinja in a sandbox, with the helpers that `transformers` gives to templates."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


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


class ChatTemplate:
    """Compiled once, rendered from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: `bos_token`, `eos_token`, ... as the template names them. Raises TemplateFailed when
        `source` is empty or no jinja."""
        if not source:
            raise TemplateFailed("this model has no chat template, so it cannot be used for chat")
        try:
            self._template = _environment().from_string(source, globals=_GLOBALS)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, up to where the assistant's answer begins. Raises TemplateFailed."""
        try:
            return self._template.render(self._special_tokens, messages=messages, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise TemplateFailed(str(error) or type(error).__name__) from error
        except Exception as error:  # a template is a program of the model's file and may fail in any way
            raise TemplateFailed(f"the model's chat template failed: {error}") from error
