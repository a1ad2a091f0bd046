"""A tree of contexts as lines of text: one a run of tokens, indented below the run that it goes on from."""

from collections.abc import Iterator

from rich.text import Text

from services.protocol.events import CachedRun, CacheTree
from services.protocol.hashing import BLOCK_TOKENS

_BAR = 40
_CONTEXT = 28
"""Columns of a run's first field, in which it is indented."""
_DEEPEST = 4
"""Deeper runs are not indented further, and say how deep they are."""
_ENDS = 4
"""Characters that are shown of each end of a session's id: some clients' ids begin alike, by the day."""
_HEAD = (
    f"{'context':<{_CONTEXT}} {'from':>8} {'tokens':>8} {'size':>8} {'device':>6} {'host':>5} {'states':>6} {'idle':>4}"
)
_STYLES = {"live": "green", "waiting": "cyan", "finished": "dim", "one_off": "dim"}


def page(tree: CacheTree) -> Iterator[Text]:
    """Of one engine; 79 columns at most, but for a long engine id."""
    device = sum(run.device for run in tree.runs)
    host = sum(run.host for run in tree.runs)
    yield Text(f"engine {tree.engine_id}: {device:,} tokens on the device, {host:,} in the host tier", style="bold")
    yield _bar("pages ", tree.pages_held, tree.pages_cached, tree.pages_total, tree.page_bytes)
    if tree.state_bytes:
        yield _bar("states", tree.states_held, tree.states_cached, tree.states_total, tree.state_bytes)
    if not tree.runs:
        yield Text("Nothing is cached.")
        return
    yield Text()
    yield Text(_HEAD, style="bold")
    depths: dict[bytes, int] = {}
    for run in tree.runs:
        depth = depths[run.name] = depths.get(run.parent, -1) + 1
        yield _line(run, depth, tree)
    if tree.left_out:
        yield Text(f"and {tree.left_out} more, used longer ago")
    if any(tier == "host" for run in tree.runs for _, tier in run.checkpoints):
        yield Text("states: on the device + in the host tier only")


def _bar(what: str, held: int, cached: int, total: int, size: int) -> Text:
    """`#` in use, `=` cached, `.` free; then the same in words."""
    cells = [round(_BAR * part / total) if total else 0 for part in (held, held + cached)]
    bar = "#" * cells[0] + "=" * (cells[1] - cells[0]) + "." * (_BAR - cells[1])
    words = f"of {total:,} ({_size(size)} each): {held:,} in use, {cached:,} cached"
    line = Text(f"{what} [{bar}]\n       {words}")
    line.stylize("green", len(what) + 2, len(what) + 2 + cells[0])
    line.stylize("blue", len(what) + 2 + cells[0], len(what) + 2 + cells[1])
    return line


def _line(run: CachedRun, depth: int, tree: CacheTree) -> Text:
    indent = "  " * depth if depth <= _DEEPEST else f"{f'({depth}) ':>{2 * _DEEPEST}}"
    name = indent + _name(run)
    states = [tier for _, tier in run.checkpoints]
    bytes = run.tokens // BLOCK_TOKENS * tree.page_bytes + len(states) * tree.state_bytes
    there, below = states.count("device"), states.count("host")
    numbers = (
        f"{run.start:>8,} {run.tokens:>8,} {_size(bytes):>8} {_share(run.device, run.tokens):>6}"
        f" {_share(run.host, run.tokens):>5} {f'{there}+{below}' if below else there or '-':>6}"
        f" {_age(run.idle_seconds):>4}"
    )
    return Text(f"{name[:_CONTEXT]:<{_CONTEXT}} {numbers}", style="" if run.shared else _STYLES.get(run.standing, ""))


def _name(run: CachedRun) -> str:
    if run.shared:
        return "several sessions"
    session = run.session_id or "?"
    if len(session) > 2 * _ENDS + 1:
        session = f"{session[:_ENDS]}~{session[-_ENDS:]}"
    return f"{session} {run.standing}"


def _share(part: int, whole: int) -> str:
    if part <= 0:
        return "-"
    return "all" if part >= whole else f"{max(1, min(99, 100 * part // whole))}%"


def _size(bytes: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes >= size:
            number = bytes / size
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{bytes} B"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"
