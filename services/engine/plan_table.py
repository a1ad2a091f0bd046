"""What a person sees of a memory plan: a table, a bar, and what else would fit."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.engine.memory_advice import DoesNotFit
from services.engine.memory_plan import Line, MemoryPlan, size

_BAR = 72
"""Characters."""
_STYLES = {
    "weights": ("W", "blue"),
    "draft head": ("D", "cyan"),
    "KV pages": ("K", "green"),
    "draft KV pages": ("d", "bright_green"),
    "states": ("S", "yellow"),
    "workspace": ("w", "magenta"),
    "decode graphs": ("g", "bright_magenta"),
    "CUDA context": ("C", "bright_black"),
    "headroom": ("h", "bright_black"),
}
_FREE = (".", "white")


def show(plan: MemoryPlan, console: Console) -> None:
    console.print(_table(plan.lines, plan.total))
    console.print(_bar(plan.lines, plan.total))
    console.print(
        f"Each of {plan.sessions} sessions may have {plan.context:,} tokens at once, read in chunks of {plan.chunk:,}. "
        f"Alone: {plan.largest_context:,}. Sessions of {plan.context:,} with fewer checkpoints: {plan.most_sessions:,}."
        if plan.sessions > 1
        else f"A session may have {plan.largest_context:,} tokens, read in chunks of {plan.chunk:,}. Sessions of "
        f"{plan.context:,} at once, with fewer checkpoints: {plan.most_sessions:,}."
    )


def show_misfit(error: DoesNotFit, console: Console) -> None:
    console.print(_table(error.lines, error.total))
    console.print(f"{error.headline}.")
    if not error.changes:
        console.print("Take a smaller model.")
        return
    table = Table("change", "bytes less", "then it", title="What would help", title_justify="left", box=None)
    table.columns[1].justify = "right"
    for change in error.changes:
        table.add_row(change.what, size(change.saves), "fits" if change.fits else "is too large still")
    console.print(table)


def _table(lines: Sequence[Line], total: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    for line in lines:
        letter, style = _STYLES[line.name]
        share = f"{line.bytes / total:.1%}"
        table.add_row(Text(letter, style), line.name, size(line.bytes), share, line.detail)
    free = total - sum(line.bytes for line in lines)
    if free >= 0:
        table.add_row(Text(_FREE[0], _FREE[1]), "left", size(free), f"{free / total:.1%}", "")
    table.add_row("", "all", size(total), "", "")
    return table


def _bar(lines: Sequence[Line], total: int) -> Text:
    """Each line's share of the total, rounded where it begins and ends, so that no error adds up."""
    bar = Text("[")
    start = 0
    for line in lines:
        letter, style = _STYLES[line.name]
        end = start + line.bytes
        bar.append(letter * (round(_BAR * end / total) - round(_BAR * start / total)), style)
        start = end
    bar.append(_FREE[0] * (_BAR - round(_BAR * start / total)), _FREE[1])
    return bar.append("]")
