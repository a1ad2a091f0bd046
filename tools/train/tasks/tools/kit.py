"""The tools of one prompt, and requests for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tools.train.tasks.source import Source
from tools.train.tasks.tools.coding_files import FILE_SKILLS
from tools.train.tasks.tools.coding_work import WORK_SKILLS
from tools.train.tasks.tools.composed import composed_skill, draw_action, draw_noun
from tools.train.tasks.tools.everyday import EVERYDAY
from tools.train.tasks.tools.held_out import Holdout, is_held_name, split
from tools.train.tasks.tools.named import named_request, named_tool
from tools.train.tasks.tools.phrasing import Request, natural_request, twin_request
from tools.train.tasks.tools.role import Role, Skill
from tools.train.tasks.tools.schema import Call, Parameter, Tool
from tools.train.tasks.wording import listed

Family = Literal["named", "coding", "everyday", "composed"]
FAMILIES: tuple[Family, ...] = ("named", "coding", "everyday", "composed")
Manner = Literal["named", "noun", "natural"]
"""The request names the tool; calls it by its noun; says what it wants."""

CODING = (*FILE_SKILLS, *WORK_SKILLS)
TOOL_TOKENS = 120
"""About what the JSON line of one tool takes."""
CODING_NOUNS = frozenset(
    listed(
        "file folder directory command page branch code test tests note task text line string content list search web "
        "copy message commit agent memory program todo terminal shell path email weather timer light phone"
    )
)
"""Nouns that no composed tool is about: a request could mean a tool of another family."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tool of the kit with what is needed to ask for it."""

    tool: Tool
    family: Family
    noun: str | None = None
    """Of a named tool."""
    skill: Skill | None = None
    phrasings: Sequence[str] = ()
    parameter_names: tuple[tuple[str, str], ...] = ()
    """Of a skill: role key -> name in the schema, in the schema's order."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a user says and the calls that answer it."""

    text: str
    calls: tuple[Call, ...]
    manner: Manner
    starts_with_text: bool = True
    ends_with_value: bool = False


def draw_kit(source: Source, family: Family, tools: int, holdout: Holdout) -> list[Item]:
    """`tools` tools with different names and topics. The first is of the family; in a natural kit one in five of the
    others may be of another family, as a distractor."""
    items: list[Item] = []
    names: set[str] = set()
    topics: set[str] = set()
    while len(items) < tools:
        kind = family if not items or family == "named" or source.chance(0.8) else source.rng.choice(FAMILIES)
        item = draw_item(source, kind, holdout, topics)
        topic = item.skill.topic if item.skill else str(item.noun)
        if item.tool.name in names or topic in topics:
            continue
        names.add(item.tool.name)
        topics.add(topic)
        items.append(item)
    return items


def draw_item(source: Source, family: Family, holdout: Holdout, topics: set[str]) -> Item:
    if family == "named":
        tool = named_tool(source, holdout.names)
        return Item(tool.tool, family, noun=tool.noun)
    if family == "composed":
        about = draw_noun(source)
        while about in CODING_NOUNS:
            about = draw_noun(source)
        # Topics of everyday and coding skills are single words, some of them the same as an action's.
        parts = [topic.partition(" ") for topic in sorted(topics)]
        known = [noun for action, _, noun in parts if noun and action in SAME_NOUN_ACTIONS]
        if known and source.chance(0.2):
            about = source.rng.choice(known)  # two tools for one thing: the verb decides
        skill = composed_skill(source, draw_action(source), about, holdout)
        return equipped(source, family, skill, skill.phrasings, holdout)
    skill = source.rng.choice(CODING if family == "coding" else EVERYDAY)
    return equipped(source, family, skill, split(skill.phrasings, holdout.phrasings), holdout)


SAME_NOUN_ACTIONS = frozenset(("get", "create", "delete", "send", "book"))


def equipped(source: Source, family: Family, skill: Skill, phrasings: Sequence[str], holdout: Holdout) -> Item:
    """The skill as one tool: a name, a description, and names for its parameters."""
    rng = source.rng
    opaque = source.chance(0.15)
    name = tool_name(source, skill, opaque, holdout.names)
    description = "" if not opaque and source.chance(0.06) else rng.choice(skill.descriptions)
    parameters: list[Parameter] = []
    for role in skill.roles:
        parameter = as_parameter(source, role, {p.name for p in parameters})
        parameters.append(parameter)
    keys = tuple((role.key, parameter.name) for role, parameter in zip(skill.roles, parameters, strict=True))
    return Item(
        Tool(name, description, tuple(parameters)), family, skill=skill, phrasings=phrasings, parameter_names=keys
    )


def tool_name(source: Source, skill: Skill, opaque: bool, held: bool) -> str:
    """A name of the training or the held-out part. An opaque one says nothing of what the tool does."""
    while True:
        if opaque:
            name = source.pseudo_word() + source.rng.choice(("", "_" + source.pseudo_word(), "_" + source.digits(2)))
        else:
            name = source.rng.choice(skill.names)
            form = source.rng.random()
            if form < 0.08:
                name = f"mcp__{source.word()}__{name}"
            elif form < 0.2:
                name = f"{source.word()}_{name}"
        if is_held_name(name) == held:
            return name


def as_parameter(source: Source, role: Role, taken: set[str]) -> Parameter:
    """A parameter whose name or description tells its meaning."""
    free = [name for name in role.names if name not in taken]
    if not free or source.chance(0.06):
        name = source.pseudo_word()
        description = source.rng.choice([text for text in role.descriptions if text])
    else:
        name = source.rng.choice(free)
        description = source.rng.choice(role.descriptions) if source.chance(0.8) else ""
    return Parameter(name, role.kind, description, not role.optional, role.choices)


def draw_ask(source: Source, item: Item, holdout: Holdout, twins: bool = False) -> Ask:
    """One request for one tool. With `twins` two calls of it, where its phrasings allow that."""
    if item.skill is None or (source.chance(0.1) and can_be_named(item.tool)):
        text, call, by_noun = named_request(source, item.tool, item.noun)
        return Ask(text, (call,), "noun" if by_noun else "named")
    request: Request | None = None
    if twins:
        request = twin_request(source, item.skill, item.phrasings, holdout)
    request = request or natural_request(source, item.skill, item.phrasings, holdout)
    calls = tuple(
        Call(item.tool.name, tuple((name, values[key]) for key, name in item.parameter_names if key in values))
        for values in request.arguments
    )
    return Ask(request.text, calls, "natural", request.starts_with_text, request.ends_with_value)


def can_be_named(tool: Tool) -> bool:
    return all(parameter.kind != "array" for parameter in tool.parameters if parameter.required)


def joined(source: Source, asks: Sequence[Ask]) -> Ask:
    """Several requests in one message, answered by the calls in the order of the text."""
    text = asks[0].text
    for before, ask in pairwise(asks):
        if before.ends_with_value:
            joiner, small = source.rng.choice((("\nThen ", True), ("\n\n", False), ("\nAfter that ", True)))
        elif text.endswith("?"):
            joiner, small = source.rng.choice(((" Then ", True), (" ", False), (" And ", True)))
        else:
            text = text.rstrip(".")
            joiner, small = source.rng.choice(
                ((". Then ", True), (". Also ", True), (", then ", True), (". ", False), (" and ", True), ("; ", True))
            )
        is_pronoun = ask.text.startswith("I ")
        text += joiner + (
            ask.text[0].lower() + ask.text[1:] if small and ask.starts_with_text and not is_pronoun else ask.text
        )
    calls = tuple(call for ask in asks for call in ask.calls)
    manner: Manner = "noun" if any(ask.manner == "noun" for ask in asks) else asks[0].manner
    return Ask(text, calls, manner, asks[0].starts_with_text, asks[-1].ends_with_value)
