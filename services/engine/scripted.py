"""An engine without a model: plays recorded answers through the same server, scheduler and step loop.

For people who build frontends, for benchmarks and for tests. A script is a JSON-lines file, one answer a line:

    {"when": TEXT, "given": TEXT, "pieces": [TEXT | {"hex": "f09f"} | {"quote": REGEX}, ...], "delay_ms": N,
     "finish": "stop" | "length"}

The first line whose `when` occurs in the last user message, and whose `given` anywhere in the prompt, answers. Each
piece comes as one token delta. A `quote` is what its pattern's first group found last in the prompt: an answer may
depend so on what the script's author did not know, a tool's result for one.
"""

import bisect
import hashlib
import math
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from services.engine.batch import ModelOutput, Row, Sampled, SampleSpec, ScheduledBatch
from services.engine.scripted_vocabulary import (
    IM_END,
    VOCABULARY,
    encode,
    last_user_message,
    prompt_text,
    scripted_bundle,
)

__all__ = ["VOCABULARY", "Script", "ScriptError", "ScriptedRunner", "load_script", "scripted_bundle"]


class ScriptError(ValueError):
    """A script that cannot be played; the message names file and line."""


class _Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece that is no plain text: one of these."""

    hex: str | None = None
    quote: str | None = None


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line as it is written."""

    when: str
    pieces: tuple[str | _Made, ...]
    delay_ms: Annotated[float, msgspec.Meta(ge=0, le=3_600_000)] = 0.0
    finish: Literal["stop", "length"] = "stop"
    given: str = ""


Piece = bytes | re.Pattern[str]
"""Of an answer: as it is said, or what is to be quoted."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A line as it is played."""

    when: str
    tokens: tuple[int, ...]
    """Of all pieces; at the end of an answer that stops, `<|im_end|>`. None where it quotes: see `to`."""
    ends: tuple[int, ...]
    """Where each piece ends in `tokens`, the final `<|im_end|>` being a piece of its own."""
    delay: float
    """Seconds before each piece."""
    finish: Literal["stop", "length"]
    given: str = ""
    quoting: tuple[Piece, ...] = ()
    """Its pieces, if some of them are quotes."""

    def to(self, prompt: str) -> "Answer":
        """What is said to this prompt, its quotes filled in."""
        if not self.quoting:
            return self
        said = [piece if isinstance(piece, bytes) else _quoted(piece, prompt) for piece in self.quoting]
        return _answer(self.when, said, self.delay, self.finish)


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    answers: tuple[Answer, ...]
    digest: str
    """Of the file's bytes."""

    @property
    def reads_prompts(self) -> bool:
        """Whether more than the last user message is looked at."""
        return any(answer.given or answer.quoting for answer in self.answers)

    @property
    def fingerprint(self) -> str:
        """Takes the place of a model's: equal scripts are equal models."""
        return f"scripted-{self.digest}"

    def answer(self, message: str, prompt: Sequence[int] = ()) -> Answer:
        """The first answer whose `when` occurs in `message`, the last user message of `prompt`, and whose `given` in
        the text of `prompt`; one that says so when there is none."""
        text = prompt_text(prompt) if self.reads_prompts else ""
        for answer in self.answers:
            if answer.when in message and answer.given in text:
                return answer.to(text)
        return _answer("", (f"No line of {self.name} matches the last user message.".encode(),), 0.0, "stop")


def _quoted(pattern: re.Pattern[str], prompt: str) -> bytes:
    """Says so where there is nothing to quote."""
    found = ""
    for match in pattern.finditer(prompt):
        found = match[1] or ""
    return (found or f"[{pattern.pattern} is not in the prompt]").encode()


def _answer(when: str, pieces: Sequence[bytes], delay: float, finish: Literal["stop", "length"]) -> Answer:
    encoded = [encode(piece) for piece in pieces]
    if finish == "stop":
        encoded.append((IM_END,))
    return Answer(
        when=when,
        tokens=tuple(token for tokens in encoded for token in tokens),
        ends=tuple(accumulate(map(len, encoded))),
        delay=delay,
        finish=finish,
    )


def load_script(path: str | Path) -> Script:
    """Read a script. Raises ScriptError where it cannot be read, has no answer, or has a line that is not one."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror or error}") from None
    decoder = msgspec.json.Decoder(_Line)
    answers: list[Answer] = []
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            pieces = [_piece(piece, index) for index, piece in enumerate(line.pieces)]
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: of _piece, and text that is not UTF-8
            raise ScriptError(f"{path}:{number}: {error}") from None
        answers.append(_line_answer(line, pieces))
    if not answers:
        raise ScriptError(f"{path}: has no line")
    return Script(path.name, tuple(answers), hashlib.blake2b(data, digest_size=16).hexdigest())


def _line_answer(line: _Line, pieces: Sequence[Piece]) -> Answer:
    said = [piece for piece in pieces if isinstance(piece, bytes)]
    answer = _answer(line.when, said, line.delay_ms / 1000, line.finish)
    if len(said) == len(pieces):
        return replace(answer, given=line.given)
    return replace(answer, tokens=(), ends=(), given=line.given, quoting=tuple(pieces))


def _piece(piece: str | _Made, index: int) -> Piece:
    if isinstance(piece, _Made) and (piece.hex is None) == (piece.quote is None):
        raise ValueError(f"piece {index} is neither a text, nor of `hex` alone, nor of `quote` alone")
    try:
        if isinstance(piece, _Made) and piece.quote is not None:
            pattern = re.compile(piece.quote)
            if not pattern.groups:
                raise ValueError("the quote's pattern has no group")
            return pattern
        data = piece.encode() if isinstance(piece, str) else bytes.fromhex(piece.hex or "")
    except (ValueError, re.error) as error:
        raise ValueError(f"piece {index}: {error}") from None
    if not data:
        raise ValueError(f"piece {index} is empty")
    return data


@dataclass(slots=True)
class _Play:
    """One request's place in time. Its place in the answer is the number of its output tokens."""

    answer: Answer
    due: float
    """time.monotonic() of the next piece."""


class ScriptedRunner:
    """A Runner that plays a script. Never waits: a row whose piece is not due gives nothing, and says when it will.

    What it keeps of a request is derived from the row, except for when the next piece is due: so resumed and
    preempted requests go on where they were.
    """

    TICK = 0.001
    """Seconds. Times that the loop is told are rounded up to it, so that 64 streams do not make 64 steps a period."""

    KEPT = 4096
    """Requests remembered at most, several times as many as may run; cancelled ones are forgotten this way only."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._plays: OrderedDict[str, _Play] = OrderedDict()

    def run(self, batch: ScheduledBatch) -> ModelOutput:
        """Rows without SampleSpec and transfers cost nothing; the scripted engine runs without kvstore."""
        now = time.monotonic()
        sampled = {row.request_id: self._sample(row, row.sample, now) for row in batch.rows if row.sample is not None}
        return ModelOutput(batch.step, sampled, transfers_failed=tuple(transfer.id for transfer in batch.transfers))

    def close(self) -> None:
        self._plays.clear()

    def _sample(self, row: Row, spec: SampleSpec, now: float) -> Sampled:
        play = self._plays.get(row.request_id)
        if play is None:
            answer = self._script.answer(last_user_message(spec.prompt), spec.prompt)
            play = self._plays[row.request_id] = _Play(answer, now + answer.delay)
            if len(self._plays) > self.KEPT:
                self._plays.popitem(last=False)
        answer, position = play.answer, len(spec.output)
        if position >= len(answer.tokens):  # the end of `length`: no token says it
            del self._plays[row.request_id]
            return Sampled((), answer.finish)
        if now < play.due and not self._at_end(answer, position):
            return Sampled((), due=math.ceil(play.due / self.TICK) * self.TICK)
        return self._next_piece(row.request_id, play, position, now)

    @staticmethod
    def _at_end(answer: Answer, position: int) -> bool:
        """Whether only the final `<|im_end|>` is left, which comes without delay."""
        return answer.finish == "stop" and position == len(answer.tokens) - 1

    def _next_piece(self, request_id: str, play: _Play, position: int, now: float) -> Sampled:
        answer = play.answer
        end = answer.ends[bisect.bisect_right(answer.ends, position)]
        tokens = answer.tokens[position:end]
        if end == len(answer.tokens) and answer.finish == "stop":
            del self._plays[request_id]
            return Sampled(tokens, "stop")
        # From the time it was due, so that the rate is exact; but a stall is not made good by a burst.
        play.due = max(play.due + answer.delay, now)
        self._plays.move_to_end(request_id)
        ending = end == len(answer.tokens) or self._at_end(answer, end)
        return Sampled(tokens, due=0.0 if ending else math.ceil(play.due / self.TICK) * self.TICK)
