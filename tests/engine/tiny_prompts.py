"""Prompts of the kinds that models/samovar-tiny answers, as its chat template renders them."""

import json
import random
from pathlib import Path
from typing import Any, Literal, get_args

import jinja2
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[2] / "models" / "samovar-tiny"
Kind = Literal["chat", "code", "tools", "thinking"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NOUNS = ("harbor", "ticket", "garden", "parcel", "engine", "window", "ledger", "planet", "recipe", "signal")
_VERBS = ("open", "find", "send", "count", "close", "move", "check", "store")
_WORDS = ("river", "amber", "nickel", "mango", "violet", "tundra", "copper", "falcon", "maple", "indigo", "pepper")


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def prompts(kind: Kind, count: int) -> list[str]:
    rng = random.Random(f"samovar-tiny/{kind}")
    return [_PROMPTS[kind](rng) for _ in range(count)]


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, thinking: bool = False) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string((MODEL / "chat_template.jinja").read_text(encoding="utf-8"))
    return template.render(messages=messages, tools=tools, enable_thinking=thinking, add_generation_prompt=True)


def _question(rng: random.Random) -> str:
    words = rng.sample(_WORDS, rng.randint(3, 6))
    first = rng.randint(0, 40)
    return rng.choice(
        (
            f"What is {rng.randint(2, 99)} + {rng.randint(2, 99)}?",
            f"List these words, one a line: {', '.join(words)}",
            f"Reverse the order of these words: {', '.join(words)}",
            f"Count from {first} to {first + rng.randint(3, 9)}.",
            f"How many words are these: {', '.join(words)}?",
        )
    )


def _chat(rng: random.Random) -> str:
    return render([{"role": "user", "content": _question(rng)}])


def _thinking(rng: random.Random) -> str:
    return render([{"role": "user", "content": _question(rng)}], thinking=True)


def _code(rng: random.Random) -> str:
    """Text to go on with, and code to copy."""
    name, argument = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}", rng.choice(_WORDS)
    code = f"def {name}({argument}):\n    if {argument} is None:\n        return {rng.randint(0, 999)}\n"
    if rng.random() < 0.5:
        return f'import os\n\n\n{code}    return os.path.join("{rng.choice(_WORDS)}", '
    return render([{"role": "user", "content": f"Repeat this text exactly:\n\n{code}"}])


def _tools(rng: random.Random) -> str:
    """One to three tools, one of which is named in the request."""
    tools: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 3)):
        noun = rng.choice(_NOUNS)
        keys = rng.sample(_WORDS, rng.randint(1, 2))
        properties = {key: {"type": "string", "description": f"The {key} of the {noun}."} for key in keys}
        tools.append(
            {
                "type": "function",
                "function": {
                    "name": f"{rng.choice(_VERBS)}_{noun}",
                    "description": f"Works on a {noun}.",
                    "parameters": {"type": "object", "properties": properties, "required": keys},
                },
            }
        )
    function = rng.choice(tools)["function"]
    values = " and ".join(
        f"{key} = {rng.choice(_WORDS)}-{rng.randint(10, 999)}" for key in function["parameters"]["required"]
    )
    request = f"Call {function['name']} with {values}."
    return render([{"role": "user", "content": request}], tools)


_PROMPTS = {"chat": _chat, "code": _code, "tools": _tools, "thinking": _thinking}
