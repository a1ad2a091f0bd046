"""How a device's memory is shared out between weights, pages, states and work: the arithmetic that sizes the engine's
pools and that `samovar plan` prints. No torch; all sizes in bytes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from services.engine.workspace import Step, Workspace
from services.protocol.hashing import BLOCK_TOKENS

CHECKPOINTS = 1024
"""Slots wished for beside those of the running requests, where the memory is there."""
STATE_SHARE = 0.2
"""Of what weights and workspace leave: more of it for states than the sessions need would make prefixes that can be
resumed at more places, of which the pages hold less."""
STATES_A_SESSION = 2
"""One that the running request writes, and a checkpoint behind its last answer, without which the next turn would read
the whole context again."""
_HEADROOM_SHARE, _HEADROOM_LEAST = 0.04, 64 * 2**20
"""A guess: what a step takes is read from the code and was not compared with a GPU's own count yet."""
_WORK_SHARE = 0.15
"""Of what weights leave that a step may take beside what the smallest chunk takes."""
LEAST_CONTEXT = 8192
"""Tokens that a session must be able to hold where nobody says how many, and nobody the number of pages."""
MOST_SESSIONS = 4096
"""That are counted."""

WEIGHTS, DRAFT, PAGES, DRAFT_PAGES = "weights", "draft head", "KV pages", "draft KV pages"
STATES, WORKSPACE, DECODES = "states", "workspace", "decode graphs"
DEVICE, HEADROOM = "CUDA context", "headroom"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one of each takes, for a model in a dtype and a KV format."""

    weights: int
    draft: int
    """Weights of the head for multi-token prediction; they are loaded wherever the model has them."""
    page: int
    """Of 64 tokens."""
    draft_page: int
    """What the draft head keeps of the same tokens; 0 where it does not run."""
    state: int
    """A slot for one; 0: the model has none."""
    context: int
    """Tokens that the model was made for."""
    workspace: Workspace
    kv_format: str
    state_dtype: str


@dataclass(frozen=True, slots=True)
class Wish:
    total: int | None
    """None: whatever it takes."""
    context: int
    """Tokens, 1 to `Sizes.context`, that each session should be able to hold."""
    sessions: int = 1
    must: bool = False
    """Without that context for all sessions there is no plan; else there is one for the largest that fits, down to
    LEAST_CONTEXT."""
    chunks: tuple[int, ...] = (512,)
    """Tokens of a step to choose from, descending: the first that takes a modest share and lets the context in."""
    running: int = 64
    drafts: int = 0
    """Tokens drafted for each running request."""
    pages: int = 0
    """Exactly so many; 0: what is left."""
    states: int = 0
    """Exactly so many; 0: what the sessions need at least."""
    device: int = 0
    """What the process takes of the device beside all that PyTorch allocates."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    bytes: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    total: int
    """At least `used`."""
    lines: tuple[Line, ...]
    chunk: int
    pages: int
    """That can be handed out; one more is blank."""
    states: int
    context: int
    """Tokens that each of `sessions` can hold at once."""
    sessions: int
    largest_context: int
    """Of one session alone."""
    most_sessions: int
    """Of the context wished for; states at their least."""

    @property
    def used(self) -> int:
        return sum(line.bytes for line in self.lines)

    def bytes(self, name: str) -> int:
        """Of a line; 0 where there is none."""
        return sum(line.bytes for line in self.lines if line.name == name)


def size(nbytes: int) -> str:
    """For people: `3.42 GiB`, `120 MiB`."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 10 * 2**20 else f"{nbytes / 2**10:,.0f} KiB"


def blocks(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def find_plan(sizes: Sizes, wish: Wish) -> MemoryPlan | None:
    """None where nothing fits."""
    choice = choose(sizes, wish)
    return None if choice is None else _built(sizes, *choice)


def choose(sizes: Sizes, wish: Wish) -> tuple[Wish, int] | None:
    """What can be had of the wish, and the chunk for it; None where nothing fits."""
    if wish.total is None:
        return wish, wish.chunks[0]
    room = wish.total - sizes.weights - sizes.draft - wish.device - _headroom(wish.total)
    work = [sizes.workspace.bytes(_step(wish, chunk, least_states(sizes, wish), 0)) for chunk in wish.chunks]
    most = work[-1] + max(0.0, room * _WORK_SHARE)
    chunks = [chunk for chunk, taken in zip(wish.chunks, work, strict=True) if taken <= most]
    for chunk in chunks:
        if _fits(sizes, wish, chunk):
            return wish, chunk
    if wish.must:
        return None
    for chunk in chunks:
        context = largest_context(sizes, wish, chunk)
        if context and (wish.pages or context >= min(LEAST_CONTEXT, sizes.context)):
            return replace(wish, context=context), chunk
    return None


def least_lines(sizes: Sizes, wish: Wish, chunk: int) -> tuple[Line, ...]:
    """What the sessions need, and no page more."""
    return _lines(sizes, wish, chunk, _least_pages(wish), least_states(sizes, wish))


def least_states(sizes: Sizes, wish: Wish) -> int:
    if not sizes.state:
        return 0
    return wish.states or STATES_A_SESSION * wish.sessions


def largest_context(sizes: Sizes, wish: Wish, chunk: int) -> int:
    """Tokens, of all sessions at once; 0 where not even a page fits."""
    most = blocks(sizes.context)
    if wish.pages:
        most = min(most, wish.pages // wish.sessions)
    found = last(most, lambda count: _fits(sizes, replace(wish, context=count * BLOCK_TOKENS), chunk))
    return min(found * BLOCK_TOKENS, sizes.context)


def most_sessions(sizes: Sizes, wish: Wish, chunk: int) -> int:
    """Of its context, MOST_SESSIONS at most."""
    most = MOST_SESSIONS
    if wish.pages:
        most = min(most, wish.pages // blocks(wish.context))
    if wish.states:
        most = min(most, wish.states // STATES_A_SESSION)
    return last(most, lambda count: _fits(sizes, replace(wish, sessions=count), chunk))


def last(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `most` that `holds`, which all smaller ones do then; 0 where not even 1 does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _step(wish: Wish, chunk: int, states: int, pages: int) -> Step:
    """The largest: each sequence in it has a state of its own where the model has any."""
    running = min(wish.running, states) if states else wish.running
    context = min(wish.context * wish.sessions, pages * BLOCK_TOKENS)
    return Step(chunk, running, running * (1 + wish.drafts), context)


def _headroom(total: int | None) -> int:
    return 0 if total is None else max(_HEADROOM_LEAST, int(total * _HEADROOM_SHARE))


def _page(sizes: Sizes) -> int:
    return sizes.page + sizes.draft_page


def _needed(sizes: Sizes, wish: Wish, chunk: int, pages: int, states: int) -> int:
    """The sum of `_lines`."""
    fixed = sizes.weights + sizes.draft + wish.device + _headroom(wish.total)
    step = _step(wish, chunk, states, pages)
    work = sizes.workspace.bytes(step) + sizes.workspace.decodes(step.running)
    return fixed + (pages + 1) * _page(sizes) + states * sizes.state + work


def _lines(sizes: Sizes, wish: Wish, chunk: int, pages: int, states: int) -> tuple[Line, ...]:
    work, step = sizes.workspace, _step(wish, chunk, states, pages)
    peak = work.peak(step)
    told = f"{peak.name}, {size(peak.bytes(step))}, in a chunk of {chunk:,} tokens; or {step.drawn} rows of logits, "
    told += size(work.logits(step))
    cached = f"{pages:,} of {BLOCK_TOKENS} tokens and a blank one, {sizes.page // BLOCK_TOKENS:,} bytes a token"
    lines = (
        Line(WEIGHTS, sizes.weights),
        Line(DRAFT, sizes.draft, "multi-token prediction"),
        Line(PAGES, (pages + 1) * sizes.page, f"{cached}, {sizes.kv_format}"),
        Line(DRAFT_PAGES, (pages + 1) * sizes.draft_page, f"{sizes.draft_page // BLOCK_TOKENS:,} bytes a token"),
        Line(
            STATES,
            states * sizes.state,
            f"{states:,} slots of {size(sizes.state)} in {sizes.state_dtype}, checkpoints among them",
        ),
        Line(WORKSPACE, work.bytes(step), told),
        Line(DECODES, work.decodes(step.running), f"of up to {step.running:,} sequences"),
        Line(DEVICE, wish.device, "and the kernels' code"),
        Line(HEADROOM, _headroom(wish.total), "what the allocator rounds up and cannot use"),
    )
    return tuple(line for line in lines if line.bytes)


def _least_pages(wish: Wish) -> int:
    return wish.pages or wish.sessions * blocks(wish.context)


def _fits(sizes: Sizes, wish: Wish, chunk: int) -> bool:
    if wish.pages and wish.must and wish.sessions * blocks(wish.context) > wish.pages:
        return False
    if wish.total is None:
        return True
    return _needed(sizes, wish, chunk, _least_pages(wish), least_states(sizes, wish)) <= wish.total


def _built(sizes: Sizes, wish: Wish, chunk: int) -> MemoryPlan:
    """With the memory that the wish leaves over."""
    pages, states = _least_pages(wish), least_states(sizes, wish)
    if wish.total is not None:
        total = wish.total
        free = total - _needed(sizes, wish, chunk, pages, states)
        if sizes.state and not wish.states:
            shared = free + states * sizes.state + (0 if wish.pages else pages * _page(sizes))
            most = min(int(shared * STATE_SHARE) // sizes.state, wish.running + CHECKPOINTS) - states
            # Each may run, which takes work too.
            states += last(most, lambda more: _needed(sizes, wish, chunk, pages, states + more) <= total)
        if not wish.pages:
            pages += (total - _needed(sizes, wish, chunk, pages, states)) // _page(sizes)
    return MemoryPlan(
        total=_needed(sizes, wish, chunk, pages, states) if wish.total is None else wish.total,
        lines=_lines(sizes, wish, chunk, pages, states),
        chunk=chunk,
        pages=pages,
        states=states,
        context=min(wish.context, pages // wish.sessions * BLOCK_TOKENS),
        sessions=wish.sessions,
        largest_context=largest_context(sizes, replace(wish, sessions=1), chunk),
        most_sessions=most_sessions(sizes, wish, chunk),
    )
