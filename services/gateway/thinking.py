"""Whether the model is to think: the spellings that clients have for it, as one set of template variables.

The first one that says something wins, from what names the template's own switch to what describes a wish:

1. `chat_template_kwargs.enable_thinking`, or `thinking` there, as other families' templates call it
2. `enable_thinking`
3. `thinking`: a boolean, or an object of type `enabled`, `adaptive` or `disabled`
4. `reasoning`: `enabled`, or `effort` as in 5
5. `reasoning_effort`, also within `chat_template_kwargs`: `none` is off, every other effort on

It matters where the model's template asks for `enable_thinking`. A template that asks for `reasoning_effort` gets the
nearest of `low`, `medium` and `high`.

How long it may think is a number of tokens: `thinking.budget_tokens`, `reasoning.max_tokens`, `thinking_budget` or
`thinking_token_budget`. The engine ends the thoughts there.
"""

from typing import Any, Protocol

from msgspec import Struct

from services.gateway.errors import invalid
from services.gateway.prompt.template import reserved

ENABLE = "enable_thinking"
EFFORT = "reasoning_effort"

_OFF = ("none", "off", "disabled")
_NEAREST = {"minimal": "low", "low": "low", "high": "high", "xhigh": "high", "max": "high"}
_SWITCH = {"enabled": True, "adaptive": True, "disabled": False}


class Switch(Struct, frozen=True):
    """`thinking`, as Anthropic's clients write it."""

    type: str | None = None
    budget_tokens: int | None = None


class Reasoning(Struct, frozen=True):
    """`reasoning`, as OpenAI's Responses and OpenRouter's clients write it."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = None


class Wishes(Protocol):
    """The fields of a request that say whether to think."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def enable_thinking(self) -> bool | None: ...
    @property
    def thinking(self) -> Switch | bool | None: ...
    @property
    def reasoning(self) -> Reasoning | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...


def template_variables(request: Wishes) -> dict[str, Any]:
    """What the template gets beside messages and tools. Raises ApiError for names that are not the client's to set,
    and for values that mean nothing."""
    given = {name: value for name, value in (request.chat_template_kwargs or {}).items() if value is not None}
    for name in given:
        if reserved(name):
            path = f"chat_template_kwargs.{name}"
            raise invalid(f"{path}: This server sets it itself.", path)
    switch = _typed(given, ENABLE, bool)
    effort = _typed(given, EFFORT, str)
    reasoning = request.reasoning or Reasoning()
    efforts = [text or None for text in (reasoning.effort, request.reasoning_effort, effort)]
    other = given.get("thinking") if isinstance(given.get("thinking"), bool) else None
    wishes = (
        switch,
        other,
        request.enable_thinking,
        _switched(request.thinking),
        reasoning.enabled,
        *map(_thinks, efforts),
    )
    thinks = next((wish for wish in wishes if wish is not None), None)
    wanted = next((effort for effort in efforts if effort is not None), None)
    variables = {name: value for name, value in given.items() if name not in (ENABLE, EFFORT)}
    if thinks is not None:
        variables[ENABLE] = thinks
    if wanted is not None and thinks:
        variables[EFFORT] = _NEAREST.get(wanted.lower(), "medium")
    return variables


def thought_budget(
    thinking: Switch | bool | None, reasoning: Reasoning | None = None, *named: int | None
) -> int | None:
    """Tokens of thoughts at most; None: as many as the model will. `named`: other servers' fields for it. Numbers below
    1, which some clients send for `no limit`, say nothing."""
    switch = thinking.budget_tokens if isinstance(thinking, Switch) else None
    given = (switch, reasoning.max_tokens if reasoning is not None else None, *named)
    return next((budget for budget in given if budget is not None and budget > 0), None)


def _typed(given: dict[str, Any], name: str, kind: type) -> Any:
    value = given.get(name)
    if value is not None and not isinstance(value, kind):
        path = f"chat_template_kwargs.{name}"
        raise invalid(f"{path}: {value!r} is no {'boolean' if kind is bool else 'string'}.", path)
    return value


def _switched(thinking: Switch | bool | None) -> bool | None:
    return _SWITCH.get(thinking.type or "") if isinstance(thinking, Switch) else thinking


def _thinks(effort: str | None) -> bool | None:
    return None if effort is None else effort.lower() not in _OFF
