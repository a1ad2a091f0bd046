"""Tools with made-up names, and requests that name the tool (or its noun) and each parameter."""

from dataclasses import dataclass

from tools.train.tasks.source import Source
from tools.train.tasks.tools.held_out import is_held_name
from tools.train.tasks.tools.schema import Call, Kind, Parameter, Tool
from tools.train.tasks.wording import listed

VERBS = listed(
    "get set find read write open close list make run send check update delete create search load save count move "
    "copy fetch show plan"
)
PARAMETERS = listed(
    "path query city name file message count limit value url text command user date key size color title code "
    "line target topic unit host"
)
TOP_FOLDERS = ("", "src", "home", "data", "lib", "tests")
KINDS: tuple[Kind, ...] = ("string", "integer", "boolean")
SUFFIXES = (".py", ".txt", ".md", ".json", "")
PAIR_FORMS = (("{} {}", True), ("{} set to {}", True), ("the {} {}", True), ("{} = {}", False), ("{}: {}", False))
"""How a parameter and its value are written; and whether "and" may join the pairs (else only commas)."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    tool: Tool
    noun: str
    """What a request may call it instead of its name; unique within a kit."""


def named_tool(source: Source, held_name: bool) -> NamedTool:
    """Up to four required parameters."""
    rng = source.rng
    name, noun = identifier(source, held_name)
    kinds: dict[str, Kind] = {}
    for _ in range(rng.choices((0, 1, 2, 3, 4), (4, 36, 34, 18, 8))[0]):
        parameter = rng.choice(PARAMETERS) if source.chance(0.7) else source.word()
        kinds[parameter] = rng.choices(KINDS, (75, 20, 5))[0]
    described = source.chance(0.4)
    parameters = tuple(Parameter(key, kind, f"The {key}." if described else "") for key, kind in kinds.items())
    return NamedTool(Tool(name, f"{name.split('_')[0].capitalize()} the {noun}.", parameters), noun)


def identifier(source: Source, held: bool) -> tuple[str, str]:
    """A snake_case name of the held-out or the training part, and the noun in it."""
    while True:
        noun = source.word() if source.chance(0.75) else source.pseudo_word()
        forms = (f"{source.rng.choice(VERBS)}_{noun}", f"{noun}_{source.word()}", noun)
        name = source.rng.choices(forms, (7, 2, 1))[0]
        if is_held_name(name) == held:
            return name, noun


def plain_value(source: Source, kind: Kind) -> str:
    """Any value, as a call carries it; strings are of one line."""
    rng = source.rng
    if kind == "integer":
        return str(rng.randint(0, 10 ** rng.randint(1, 5)))
    if kind == "boolean":
        return rng.choice(("true", "false"))
    form = rng.random()
    if form < 0.3:
        return source.word()
    if form < 0.5:
        folders = [rng.choice(TOP_FOLDERS), *(source.word() for _ in range(rng.randint(1, 3)))]
        return "/".join(folders) + rng.choice(SUFFIXES)
    if form < 0.7:
        return source.words(2, 6)
    if form < 0.8:
        return source.code()
    if form < 0.9:
        return source.pseudo_word().capitalize()
    if source.chance(0.3):
        return f"{source.word()}@{source.pseudo_word()}.com"
    return f"{source.word()} = {source.word()}({rng.randint(0, 99)})"


def named_request(source: Source, tool: Tool, noun: str | None) -> tuple[str, Call, bool]:
    """A request that names every required parameter, its call, and whether the tool is called by its noun only (never
    without a noun)."""
    rng = source.rng
    arguments = tuple(
        (p.name, rng.choice(p.choices) if p.choices else plain_value(source, p.kind))
        for p in tool.parameters
        if p.required and p.kind != "array"
    )
    call = Call(tool.name, arguments)
    if not arguments:
        return rng.choice((f"Call {tool.name}.", f"Please use {tool.name}.", f"Run {tool.name} now.")), call, False
    quote = rng.choice(('"{}"', "{}", "{}", "`{}`"))
    kinds = {p.name: p.kind for p in tool.parameters}
    form, may_use_and = rng.choice(PAIR_FORMS)
    pairs = [form.format(name, quote.format(value) if kinds[name] == "string" else value) for name, value in arguments]
    joiner = " and " if may_use_and and source.chance(0.5) else ", "
    heads = [
        f"Call {tool.name} with",
        f"Please use {tool.name} with",
        f"Use {tool.name} for",
        f"I need {tool.name} with",
        f"Can you run {tool.name} with",
    ]
    by_noun = noun is not None and source.chance(1 / 6)
    head = f"Use the {noun} tool with" if by_noun else rng.choice(heads)
    return f"{head} {joiner.join(pairs)}" + ("." if source.chance(2 / 3) else ""), call, by_noun
