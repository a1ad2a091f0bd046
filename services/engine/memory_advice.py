"""What to change where a model and its cache do not fit. No torch; all sizes in bytes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from services.engine.memory_plan import (
    LEAST_CONTEXT,
    Line,
    MemoryPlan,
    Sizes,
    Wish,
    choose,
    find_plan,
    largest_context,
    last,
    least_lines,
    most_sessions,
    size,
)
from services.protocol.hashing import BLOCK_TOKENS
from services.settings import SettingsError

Alternative = tuple[str, Sizes]
"""A setting as one would write it, and what the model takes with it."""

_CHUNKS = (2048, 1024, 512)


@dataclass(frozen=True, slots=True)
class Change:
    """One that would help, by itself."""

    what: str
    saves: int
    fits: bool


class DoesNotFit(SettingsError):
    """No plan; the message is one line."""

    def __init__(self, wish: Wish, lines: tuple[Line, ...], changes: tuple[Change, ...]) -> None:
        assert wish.total is not None
        self.total, self.lines, self.changes = wish.total, lines, changes
        self.needed = sum(line.bytes for line in lines)
        sessions = f"{wish.sessions} sessions" if wish.sessions > 1 else "one session"
        self.headline = f"{size(self.needed)} are needed for {sessions} of {wish.context:,} tokens, "
        self.headline += f"{size(wish.total)} are there"
        if self.needed > wish.total:
            self.headline += f": {size(self.needed - wish.total)} too much"
        told = [change for change in changes if change.fits] or list(changes)
        means = "; ".join(f"{change.what} ({size(change.saves)} less)" for change in told) or "a smaller model"
        kind = "Any of these fits" if told and told[0].fits else "None of these is enough alone"
        super().__init__(f"{self.headline}. {kind if told else 'What would fit'}: {means}")


def plan(sizes: Sizes, wish: Wish, alternatives: Callable[[], Iterable[Alternative]] = tuple) -> MemoryPlan:
    """`alternatives` are asked for where something must change. Raises DoesNotFit."""
    found = find_plan(sizes, wish)
    if found is not None:
        return found
    least = wish if wish.must else replace(wish, context=min(LEAST_CONTEXT, wish.context))
    raise DoesNotFit(least, least_lines(sizes, least, wish.chunks[-1]), _changes(sizes, least, alternatives()))


def _changes(sizes: Sizes, wish: Wish, alternatives: Iterable[Alternative]) -> tuple[Change, ...]:
    """Those that fit before those that do not; of each kind that first which changes least."""
    smallest = wish.chunks[-1]
    found: list[Change] = []

    def consider(what: str, other: Sizes, wished: Wish) -> None:
        saves = _needed(sizes, wish) - _needed(other, wished)
        if saves > 0:
            found.append(Change(what, saves, choose(other, wished) is not None))

    for setting, other in sorted(alternatives, key=lambda item: -_token(item[1]) - item[1].weights - item[1].draft):
        told = []
        if _token(other) != _token(sizes):
            told.append(f"{_token(other):,} bytes of K and V a token and not {_token(sizes):,}")
        if other.state != sizes.state:
            told.append(f"states of {size(other.state)} and not {size(sizes.state)}")
        if other.weights + other.draft != sizes.weights + sizes.draft:
            told.append(f"weights of {size(other.weights + other.draft)}")
        consider(f"{setting}: {', '.join(told)}", other, wish)
    if wish.pages:
        pages = last(wish.pages, lambda count: choose(sizes, replace(wish, pages=count)) is not None)
        consider(f"SAMOVAR_KV_PAGES={pages or 1}", sizes, replace(wish, pages=pages or 1))
    if wish.states:
        states = last(wish.states, lambda count: choose(sizes, replace(wish, states=count)) is not None)
        consider(f"SAMOVAR_STATES={states or 1}", sizes, replace(wish, states=states or 1))
    if wish.sessions > 1:
        fewer = most_sessions(sizes, wish, smallest) or 1
        consider(f"{fewer} session{'s' if fewer > 1 else ''}", sizes, replace(wish, sessions=fewer))
    if wish.must and (context := largest_context(sizes, wish, smallest)):
        consider(f"SAMOVAR_MAX_MODEL_LEN={context}", sizes, replace(wish, context=context))
    for chunk in _CHUNKS:
        if chunk < smallest:
            consider(f"SAMOVAR_MAX_BATCH_TOKENS={chunk}", sizes, replace(wish, chunks=(chunk,)))
    if wish.running > wish.sessions:
        consider(f"SAMOVAR_MAX_RUNNING={wish.sessions}", sizes, replace(wish, running=wish.sessions))
    return tuple(sorted(found, key=lambda change: not change.fits))


def _needed(sizes: Sizes, wish: Wish) -> int:
    """At least, with the smallest chunk."""
    return sum(line.bytes for line in least_lines(sizes, wish, wish.chunks[-1]))


def _token(sizes: Sizes) -> int:
    """Bytes of K and V."""
    return (sizes.page + sizes.draft_page) // BLOCK_TOKENS
