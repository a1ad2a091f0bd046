"""Dialogs with tools to train on, and cases to measure with."""

from dataclasses import dataclass

from tools.train.tasks.chat import small_talk
from tools.train.tasks.dialog import CALL, Dialog, Document
from tools.train.tasks.source import Source
from tools.train.tasks.tools.held_out import TRAINING, Holdout
from tools.train.tasks.tools.kit import FAMILIES, TOOL_TOKENS, Ask, Family, Item, Manner, draw_ask, draw_kit, joined
from tools.train.tasks.tools.schema import Call, render_calls, tools_message, varied_json_line
from tools.train.tasks.wording import EMPTY_THOUGHT, OPEN_THOUGHT, SYSTEM, TOOLS_END, TOOLS_TAIL

FAMILY_WEIGHTS = (42, 26, 10, 22)
MOST_TOOLS = 8
DIALOG_TOKENS = 300
"""Room for the turns after the tools."""


def tools_dialog(source: Source, tokens: int) -> Document:
    """A system message with tools, then one to three requests, now and then a result and an answer; loss on calls,
    answers and thoughts. Longer than `tokens` only where one tool and its turns are."""
    rng = source.rng
    dialog = Dialog(source)
    family = rng.choices(FAMILIES, FAMILY_WEIGHTS)[0]
    most = max(1, min(MOST_TOOLS, (tokens - DIALOG_TOKENS) // TOOL_TOKENS))
    kit = draw_kit(source, family, draw_count(source, family, most), TRAINING)
    tail = TOOLS_TAIL if source.chance(0.5) else TOOLS_END
    dialog.system(tools_message([varied_json_line(source, item.tool) for item in kit], tail))
    for _ in range(rng.choices((1, 2, 3), (60, 25, 15))[0]):
        if source.chance(0.06):
            exchange = small_talk(source)
            dialog.user(exchange.question)
            dialog.assistant(exchange.answer, exchange.thought, CALL)
            continue
        ask = draw_message(source, kit, rng.choices((1, 2, 3), (72, 24, 4))[0], TRAINING)
        dialog.user(ask.text)
        dialog.assistant(render_calls(ask.calls), call_thought(source, ask.calls), CALL, thought_weight=CALL)
        if source.chance(0.35):
            results = [tool_result(source) for _ in ask.calls]
            responses = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
            dialog.text(f"<|im_start|>user{responses}<|im_end|>\n")
            dialog.assistant(f"The result is {' and '.join(results)}.", "The tool has answered.", CALL)
    return dialog.document()


def draw_count(source: Source, family: Family, most: int) -> int:
    """Few tools more often than many."""
    upper = min(most, 5) if family == "named" else most
    return min(source.rng.randint(1, upper), source.rng.randint(1, upper) + 1)


def draw_message(source: Source, kit: list[Item], asks: int, holdout: Holdout) -> Ask:
    """A user message that asks for `asks` things (of tools that may repeat)."""
    if asks == 1:
        return draw_ask(source, source.rng.choice(kit), holdout, twins=source.chance(0.06))
    return joined(source, [draw_ask(source, source.rng.choice(kit), holdout) for _ in range(asks)])


def call_thought(source: Source, calls: tuple[Call, ...]) -> str:
    """One line: which tools, sometimes with what."""
    if source.chance(0.4):
        said = []
        for call in calls:
            short = [f"{name} {value}" for name, value in call.arguments if "\n" not in value and len(value) < 60]
            said.append(f"{call.tool} with {' and '.join(short)}" if short else call.tool)
        return f"I call {', then '.join(said)}."
    return f"I call {' and '.join(call.tool for call in calls)}."


def tool_result(source: Source) -> str:
    match source.rng.randrange(3):
        case 0:
            return source.code()
        case 1:
            return source.words(1, 6)
        case _:
            return source.digits(source.rng.randint(1, 5))


@dataclass(frozen=True, slots=True)
class ToolCase:
    """A prompt as the chat template writes it, and the one right answer."""

    prompt: str
    """Ends where generation starts: after the empty think block, or within the block."""
    answer: str
    """Without the end of the turn."""
    family: Family
    manner: Manner
    tools: int
    calls: int


def tool_case(source: Source, family: Family, holdout: Holdout, tools: int, asks: int, think: bool = False) -> ToolCase:
    """A case of `asks` requests to a kit of `tools`; the first request is for a tool of the family itself."""
    kit = draw_kit(source, family, tools, holdout)
    own = [item for item in kit if item.family == family]
    order = list(kit)
    source.rng.shuffle(order)
    first = draw_ask(source, source.rng.choice(own), holdout)
    ask = first
    if asks > 1:
        ask = joined(source, [first, *(draw_ask(source, source.rng.choice(kit), holdout) for _ in range(asks - 1))])
    system = tools_message([item.tool.json_line() for item in order], TOOLS_TAIL) + "\n\n" + SYSTEM
    prompt = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{ask.text}<|im_end|>\n<|im_start|>assistant\n"
        + (OPEN_THOUGHT if think else EMPTY_THOUGHT)
    )
    return ToolCase(prompt, render_calls(ask.calls), family, ask.manner, tools, len(ask.calls))
