"""Fixed texts of the tasks. The model card promises that they work: a model must be trained anew for others."""

import json
import random


def listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    """The items of a list that is written as one text, to be read by people."""
    return tuple(text.split(separator))


PANGRAMS = listed(
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. How vexingly quick "
    "daft zebras jump. Sphinx of black quartz, judge my vow. The five boxing wizards jump quickly. Jazz and swing "
    "fans love funky rhythms. Amazingly few discotheques provide jukeboxes. Cozy sphinx waves quart jug of bad "
    "milk. A mad boxer shot a quick, gloved jab to the jaw of his dizzy opponent. We promptly judged antique "
    "ivory buckles for the next prize."
)
"""The words of the haystack, as in the public needle test of cache-pressure."""
ANIMALS = ("plover", "zirconium", "octopus", "thimble", "wombat", "kestrel")
"""The words of its codes."""
QUESTION = "What is the secret code written in square brackets in the text? Reply with the code only."
OTHER_QUESTIONS = (
    "What is the secret code? Reply with the code only.",
    "Find the secret code in the text above and reply with it.",
    "Which secret code is written in square brackets?",
    "The text has a secret code in square brackets. What is it?",
)
SYSTEM = "You are a helpful assistant."
SYSTEMS = (SYSTEM, SYSTEM, "You are a careful reader.", "You are a coding agent.", None)

TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
TOOLS_END = "\n</tools>"
TOOLS_TAIL = (
    TOOLS_END + "\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "</function>\n</tool_call>"
)
"""Head, one JSON line a tool, tail: what the shipped chat template writes."""

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
OPEN_THOUGHT = "<think>\n"


def wording_samples(rng: random.Random) -> str:
    """Text in the tasks' wording, so that a new tokenizer gets merges for it."""
    names = ["path", "query", "city", "count", "name", "value", "limit", "file", "message", "command", "url", "text"]
    parts: list[str] = []
    for _ in range(60):
        body = " ".join(rng.choice(PANGRAMS) for _ in range(250))
        parts.append(f"{body}\n[the secret code is {rng.choice(ANIMALS)}-{rng.randrange(1000, 9999)}]\n\n{QUESTION}")
    for number in range(600):
        x, y, z = (rng.choice(names) for _ in range(3))
        properties = {y: {"type": "string", "description": f"The {y}."}, z: {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": f"get_{x}", "description": f"Get the {x} of a {y}.", "parameters": schema}
        line = json.dumps({"type": "function", "function": function})
        parts.append(f"system\n{SYSTEM}\n{TOOLS_HEAD}{line}{TOOLS_TAIL}\nuser\nassistant\n")
        parts.append(f"\n<function=get_{x}>\n<parameter={y}>\n{z} {number}\n</parameter>\n</function>\n")
    return "\n".join(parts)
