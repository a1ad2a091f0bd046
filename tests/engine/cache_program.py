"""Random programs for a `CacheRig`: what clients, time, the device and the store do, as a list of values.

Every action means something in any state, so that a program may be cut anywhere: that is how hypothesis, and `shrink`,
find the smallest one that fails. It is printed as Python and runs by `play`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from services.engine.batch import Runner, Transfer
from services.engine.mailbox import Inspect, NoteSession
from services.engine.request import Request
from services.protocol.generate import SamplingParams, Standing, ThoughtLimit
from tests.engine.cache_rig import VOCABULARY, CacheRig, Kind, Size, as_it_is, cold
from tests.fakes import Fate

STOP = 7
DRAWS: tuple[SamplingParams, ...] = (
    SamplingParams(max_tokens=1, temperature=0),
    SamplingParams(max_tokens=1, temperature=0, stop_token_ids=(STOP, 20, 60)),
    SamplingParams(max_tokens=1, temperature=0.8, seed=3),
    SamplingParams(max_tokens=1, temperature=1.2, top_k=20, top_p=0.9, seed=4, repetition_penalty=1.3),
    SamplingParams(
        max_tokens=1,
        temperature=0,
        presence_penalty=0.5,
        thoughts=ThoughtLimit(tokens=5, close=90, closing=(91, 90, 92)),
    ),
)
STANDINGS: tuple[Standing, ...] = ("live", "waiting", "idle", "finished", "one_off")


@dataclass(frozen=True, slots=True)
class How:
    """What a request brings beside its prompt."""

    most: int = 4
    """Tokens of its answer."""
    draw: int = 0
    hints: tuple[int, ...] = ()
    """Percents of the prompt's length."""
    salt: bool = False
    resumed: int = 0
    """Tokens of its answer that another engine gave."""
    session: int = 0
    standing: Standing = "idle"


@dataclass(frozen=True, slots=True)
class Fresh:
    """Tokens of one of a few texts: two of one text share a prefix, two of one length are the same prompt."""

    text: int
    length: int
    count: int = 1
    """So many at once, all alike."""
    how: How = How()


@dataclass(frozen=True, slots=True)
class Extended:
    """A context that was answered (or called off), with its answer, and more; or what was sent, once more."""

    which: int
    more: int
    edited: int = -1
    """Percent of its length at which a token is another one; negative: none is."""
    answer: bool = True
    how: How = How()


@dataclass(frozen=True, slots=True)
class Crowd:
    """Agents with one system text and a few tokens of their own each."""

    text: int
    length: int
    count: int = 40


@dataclass(frozen=True, slots=True)
class Steps:
    count: int


@dataclass(frozen=True, slots=True)
class Abort:
    which: int


@dataclass(frozen=True, slots=True)
class Preempt:
    which: int


@dataclass(frozen=True, slots=True)
class PushOut:
    """All that nobody holds leaves the device."""


@dataclass(frozen=True, slots=True)
class Fates:
    """Of copies under way, each time that one is looked at, over and over."""

    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """kills: it is gone with all that it had, or an empty one is there. slow: calls wait from now on. full: it gives
    nothing up from now on. forgets: one object."""

    what: Literal["kills", "slow", "quick", "full", "roomy", "forgets"]
    which: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """The gateway has something to say of a session."""

    session: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class Answers:
    """To calls that wait: so many, from the last or the first on, or as if the store were away."""

    count: int
    last: bool = False
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """Somebody asks what is cached."""


Action = Fresh | Extended | Crowd | Steps | Abort | Preempt | PushOut | Fates | Store | Answers | Note | Look
Program = Sequence[Action]

_TEXTS = [[random.Random(seed).randrange(VOCABULARY) for _ in range(2000)] for seed in range(8)]


class Play:
    """One run of a program."""

    def __init__(self, rig: CacheRig) -> None:
        self.rig = rig
        self._fates: tuple[Fate, ...] = ("done",)
        self._looks = 0
        rig.transfers.fate = self._fate

    def act(self, action: Action) -> None:
        rig = self.rig
        match action:
            case Fresh():
                for _ in range(action.count):
                    self._submit(_text(action.text, action.length), action.how)
            case Extended():
                self._extended(action)
            case Crowd(text, length, count):
                for index in range(count):
                    self._submit(_text(text, length) + _text(index, 3 + index % 5), How(most=2, hints=(95,)), length)
            case Steps(count):
                for _ in range(count):
                    rig.step()
            case Abort(which):
                if alive := [name for name, book in rig.books.items() if book.final is None]:
                    rig.cancel(alive[which % len(alive)])
            case Preempt(which):
                if active := rig.active():
                    rig.preempt(active[which % len(active)])
            case PushOut():
                rig.push_out()
            case Fates(fates):
                self._fates = fates
            case Store():
                self._store(action)
            case Note(session, standing):
                rig.inbox.put(NoteSession(_session(session), standing))
            case Look():
                rig.inbox.put(Inspect())
            case Answers(count, last, empty):
                for _ in range(min(count, len(rig.store.calls))):
                    rig.store.answer(-1 if last else 0, empty)

    def _store(self, action: Store) -> None:
        store = self.rig.store
        match action.what:
            case "kills" if self.rig.size.objects:
                (store.connect if store.arena is None else store.disconnect)()
            case "slow" | "quick":
                store.automatic = action.what == "quick"
            case "full" | "roomy":
                store.full = action.what == "full"
            case "forgets" if store.committed:
                store.forget(sorted(store.committed)[action.which % len(store.committed)])
            case _:
                pass

    def _fate(self, transfer: Transfer) -> Fate:
        self._looks += 1
        return self._fates[self._looks % len(self._fates)]

    def _extended(self, action: Extended) -> None:
        books = list(self.rig.books.values())
        if not books:
            return
        book = books[action.which % len(books)]
        tokens = list(book.prompt) + (book.told if action.answer else [])
        if action.edited >= 0:
            place = action.edited * (len(tokens) - 1) // 100
            tokens[place] = (tokens[place] + 1) % VOCABULARY
        self._submit(tokens + _text(len(tokens), action.more), action.how)

    def _submit(self, prompt: list[int], how: How, hint: int = 0) -> None:
        rig = self.rig
        prompt = prompt[: rig.most - 1]
        sampling = replace(DRAWS[how.draw % len(DRAWS)], max_tokens=how.most)
        generated: list[int] = []
        if how.resumed and sampling.thoughts is None:  # an engine gives what closes the thoughts with what ends them
            generated += cold(rig.kind, tuple(prompt), sampling, rig.most)[: how.resumed]
        hints = {max(1, len(prompt) * percent // 100) for percent in how.hints} | ({hint} if hint else set())
        rig.submit(
            Request(
                request_id=f"r{len(rig.books)}",
                gateway_id="gateway",
                prompt=prompt,
                output=generated,
                resumed=len(generated),
                sampling=sampling,
                cache_salt="salt" if how.salt else "",
                session_id=_session(how.session),
                standing=how.standing,
                hints=tuple(sorted(hints)),
            )
        )


def _session(number: int) -> str:
    return f"session-{number}" if number else ""


def _text(which: int, length: int) -> list[int]:
    return _TEXTS[which % len(_TEXTS)][:length]


def play(kind: Kind, size: Size, program: Program, wrap: Callable[[Runner], Runner] = as_it_is) -> CacheRig:
    """Run a program to its end, and what it left: the last contexts are asked for once more. Raises AssertionError."""
    played = Play(CacheRig(kind, size, wrap))
    rig = played.rig
    for action in program:
        played.act(action)
    rig.settle()
    for which in range(min(4, len(rig.books))):
        played.act(Extended(len(rig.books) - 1 - 2 * which, 0, answer=which % 2 == 0, how=How(most=2)))
    rig.settle()
    return rig


# Random ones.


def random_size(rng: random.Random) -> Size:
    return Size(
        pages=rng.choice([9, 14, 24, 40]),
        slots=rng.choice([2, 3, 6, 20]),
        chunk=rng.choice([20, 64, 100, 256, 1024]),
        running=rng.choice([2, 4, 8]),
        interval=rng.choice([64, 192, 8192]),
        gap=rng.choice([1, 20, 64]),
        objects=rng.choice([0, 6, 40, 200, 200]),
        ahead=rng.random() < 0.4,
    )


def random_program(rng: random.Random, length: int) -> list[Action]:
    """Rates differ from program to program."""
    weights = {kind: rng.choice([0.2, 1.0, 1.0, 3.0]) for kind in (Fresh, Extended, Abort, Preempt, PushOut, Fates)}
    weights |= {
        Store: rng.choice([0.1, 1.0]),
        Note: 0.5,
        Look: 0.2,
        Answers: 2.0,
        Steps: 6.0,
        Crowd: rng.choice([0.0, 0.1]),
    }
    kinds = rng.choices(list(weights), list(weights.values()), k=length)
    return [_random_action(rng, kind) for kind in kinds]


def _random_action(rng: random.Random, kind: type) -> Action:
    if kind is Fresh:
        return Fresh(rng.randrange(3), _length(rng), rng.choice([1, 1, 1, 2]), _how(rng))
    if kind is Extended:
        edited = rng.choice([-1, -1, -1, 0, 30, 60, 90, 100])
        return Extended(rng.randrange(50), rng.choice([0, 1, 20, 64, 130]), edited, rng.random() < 0.8, _how(rng))
    if kind is Crowd:
        return Crowd(rng.randrange(3), rng.choice([60, 64, 150]), rng.choice([5, 12, 40]))
    if kind is Steps:
        return Steps(rng.choice([1, 1, 2, 4, 10]))
    if kind is Abort:
        return Abort(rng.randrange(8))
    if kind is Preempt:
        return Preempt(rng.randrange(8))
    if kind is Fates:
        few: list[Fate] = ["done", "done", "wait", "failed"]
        return Fates(tuple(rng.choice(few) for _ in range(rng.randint(1, 7))) if rng.random() < 0.6 else ("done",))
    if kind is Store:
        return Store(
            rng.choice(["kills", "slow", "slow", "quick", "full", "roomy", "forgets", "forgets"]), rng.randrange(99)
        )
    if kind is Note:
        return Note(rng.randrange(4), rng.choice(STANDINGS))
    if kind is Look:
        return Look()
    if kind is Answers:
        return Answers(rng.choice([1, 2, 9]), rng.random() < 0.4, rng.random() < 0.1)
    return PushOut()


def _length(rng: random.Random) -> int:
    return rng.choice([1, 30, 63, 64, 65, 128, 150, 192, 300, 450]) + rng.choice([0, 0, 1, 5])


def _how(rng: random.Random) -> How:
    hints = tuple(sorted({rng.randint(1, 100) for _ in range(rng.choice([0, 0, 1, 3]))}))
    return How(
        most=rng.choice([1, 2, 6, 30, 70]),
        draw=rng.choice([0, 0, 1, 2, 3, 4]),
        hints=hints,
        salt=rng.random() < 0.1,
        resumed=rng.choice([0, 0, 0, 0, 2, 5]),
        session=rng.randrange(4),
        standing=rng.choice(STANDINGS),
    )


# Smaller ones.


def shrink(program: Program, fails: Callable[[Program], bool]) -> list[Action]:
    """A program that still fails, and does not when any one action is left out."""
    smallest, size = list(program), max(1, len(program) // 2)
    while True:
        place = 0
        while place < len(smallest):
            shorter = smallest[:place] + smallest[place + size :]
            if fails(shorter):
                smallest = shorter
            else:
                place += size
        if size == 1:
            return smallest
        size //= 2
