"""A natural request from a skill's phrasing, with the arguments that follow from it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.train.tasks.source import Source
from tools.train.tasks.tools.held_out import Holdout, split
from tools.train.tasks.tools.role import Role, Skill
from tools.train.tasks.tools.values import Value

PLACEHOLDER = re.compile(r"\{(\w+)(?:=(\w+))?\}")
PREFIXES = (
    "please {}",
    "can you {}",
    "could you {}",
    "I want you to {}",
    "now {}",
    "would you {}",
    "hey, {}",
    "just {}",
)
QUESTION_PREFIXES = ("can", "could", "would")
NOT_IMPERATIVE = frozenset(("I", "in", "the", "these", "new", "weather", "at", "on", "we"))
"""First words of phrasings that take no prefix."""
FENCES = ("\n\n```\n{}\n```", "\n```\n{}\n```", "\n\n{}", "\n{}", "\n\n{}")


@dataclass(frozen=True, slots=True)
class Request:
    text: str
    """Starts with a capital unless a value stands first."""
    arguments: tuple[dict[str, str], ...]
    """For each call in order: role key -> value as the call carries it."""
    starts_with_text: bool
    """The first character belongs to the phrasing, so it may be written small after a conjunction."""
    ends_with_value: bool
    """The text ends with a bare value that runs to the end of its line: nothing may follow on it."""


def natural_request(source: Source, skill: Skill, phrasings: Sequence[str], holdout: Holdout) -> Request:
    """One call. `phrasings` are those of the skill that may be used."""
    return fill(source, skill, source.rng.choice(phrasings), holdout, calls=1)


def twin_request(source: Source, skill: Skill, phrasings: Sequence[str], holdout: Holdout) -> Request | None:
    """Two calls of one tool in one phrase ("read a.py and b.py"); None if no phrasing of the skill allows it."""
    suitable = [phrasing for phrasing in phrasings if takes_two_values(skill, phrasing)]
    return fill(source, skill, source.rng.choice(suitable), holdout, calls=2) if suitable else None


def takes_two_values(skill: Skill, phrasing: str) -> bool:
    placeholders = PLACEHOLDER.findall(phrasing)
    if len(placeholders) != 1:
        return False
    role = next(role for role in skill.roles if role.key == placeholders[0][0])
    return role.kind == "string" and role.style == "plain" and not role.choices and "?" not in phrasing


def fill(source: Source, skill: Skill, phrasing: str, holdout: Holdout, calls: int) -> Request:
    roles = {role.key: role for role in skill.roles}
    arguments: list[dict[str, str]] = [{} for _ in range(calls)]
    template, closing = polite(source, phrasing, holdout)
    parts: list[str] = []
    used: set[str] = set()
    end_of_last = 0
    bare_end = False
    for match in PLACEHOLDER.finditer(template):
        parts.append(template[end_of_last : match.start()])
        end_of_last = match.end()
        key, fixed = match.groups()
        if fixed is not None:
            for call in arguments:
                call[key] = fixed
            continue
        written: list[str] = []
        is_last = match.end() == len(template)
        for call in arguments:
            value = fresh_value(source, roles[key], used)
            text, bare_end = write(source, roles[key], value, is_last)
            written.append(text)
            call[key] = value.argument
        parts.append(" and ".join(written))
    parts.append(template[end_of_last:])
    bare_end = bare_end and end_of_last == len(template)
    text = "".join(parts)
    starts_with_text = not template.startswith("{")
    if starts_with_text:
        text = text[0].upper() + text[1:]
    if not bare_end and text[-1] not in "?.":
        text += closing if closing == "?" or text[-1].isalnum() or text[-1] in "\"'`" else ""
    return Request(text, tuple(arguments), starts_with_text, bare_end)


def polite(source: Source, phrasing: str, holdout: Holdout) -> tuple[str, str]:
    """The phrasing, sometimes with a prefix, and what ends it."""
    closing = source.rng.choice((".", "", "."))
    imperative = "?" not in phrasing and phrasing[0] != "{" and phrasing.split()[0] not in NOT_IMPERATIVE
    if not imperative or source.chance(0.55):
        return phrasing, closing
    prefix = source.rng.choice(split(PREFIXES, holdout.phrasings))
    if prefix.split()[0] in QUESTION_PREFIXES:
        closing = "?"
    return prefix.replace("{}", phrasing), closing


def fresh_value(source: Source, role: Role, used: set[str]) -> Value:
    """A value that no other parameter of the request has: swapped parameters must show."""
    while True:
        value = role.draw(source)
        if value.written not in used:
            used.add(value.written)
            return value


def write(source: Source, role: Role, value: Value, is_last: bool) -> tuple[str, bool]:
    """The value as the request writes it, and whether it stands bare to the end of its line or message."""
    text = value.written
    if role.style == "block":
        fence = source.rng.choice([form for form in FENCES if "```" not in form or "```" not in text])
        return fence.replace("{}", text), True
    if role.style == "last" and is_last and source.chance(0.6):
        return text, True
    quotes = [quote for quote in "\"`'" if quote not in text]
    quoted = role.style in ("quoted", "last") or source.chance(0.25)
    if role.kind == "integer" or role.choices or role.kind == "array" or not quoted or not quotes:
        return text, role.kind == "array" or (role.style != "plain" and is_last)
    quote = source.rng.choices(quotes, [3, 2, 1][: len(quotes)])[0]
    return f"{quote}{text}{quote}", False
