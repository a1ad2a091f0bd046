"""Decodes as captured CUDA graphs, each started before the host knows what the one before has drawn.

A graph is one launch for a thousand kernels, which the host could not start as fast as the GPU runs them; and a step
ahead hides what the host does between two steps. The step ahead guesses that all sequences go on: it takes their tokens
from the last draw, on the device. It leaves the recurrent states where the step before has left them, so that it may
turn out to be unwanted; the step behind it moves them on (`Unfolded`). What it writes to pages lies behind the
sequences' ends.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from services.engine.batch import Row, Sampled
from services.engine.cache.pages import KvPages
from services.engine.cache.states import StatePool
from services.engine.model.context import begin
from services.engine.model.family import Decoder
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.sampler import Drawn, Sampler, SampleRow
from services.engine.step_inputs import Bucket, StepInputs
from services.engine.unfolded import Unfolded
from services.protocol.hashing import BLOCK_TOKENS

log = logging.getLogger(__name__)

_SHORT = 8320
"""Tokens of context up to which smaller page tables and fewer programs of attention do: 8192 and an answer's begin."""
_WARM_UPS = 2
"""Before a capture: kernels are compiled, and libraries take their workspaces."""


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: StepInputs
    run: Callable[[], object]
    """Everything between the inputs and the sampler's tokens, enqueued."""


@dataclass(frozen=True, slots=True)
class _Started:
    rows: tuple[Row, ...]
    """Of a step ahead without their tokens."""
    drawn: Drawn


class DecodeSteps:
    """All calls come from one thread at a time; what they enqueue goes to the current stream.

    Between calls the pool's states are those behind the last step that was asked for.
    """

    def __init__(
        self, model: Decoder, pages: KvPages, states: StatePool | None, sampler: Sampler, device: torch.device
    ) -> None:
        """On a CPU nothing is captured, and the same steps run as they are."""
        self._model = model
        self._pages = pages
        self._states = states
        self._sampler = sampler
        self._device = device
        self._graphs: dict[Bucket, _Graph] = {}
        self._unfolded: Unfolded | None = None
        self._ahead: _Started | None = None
        self.guessed = 0
        """Steps that were started before they were asked for."""
        self._given: dict[str, int] = {}
        """The tokens that the last step gave, by request."""
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._pool = torch.cuda.graph_pool_handle() if cuda else None

    def capture(self, buckets: Sequence[Bucket], seconds: float, progress: Callable[[float, str], None]) -> None:
        """One after the other, until the time is up: steps without a graph are run kernel by kernel."""
        until = time.monotonic() + seconds
        if buckets and isinstance(self._model, HybridDecoder) and self._states is not None:
            self._unfolded = Unfolded(self._model, self._states, max(bucket.rows for bucket in buckets))
        for done, bucket in enumerate(buckets):
            if time.monotonic() > until:
                log.warning("%d of %d decode graphs captured in %.0f s: no more", done, len(buckets), seconds)
                return
            progress(done / len(buckets), f"capturing decode steps of {bucket.rows} x {bucket.context} tokens")
            self._graphs[bucket] = self._captured(bucket)

    def find(self, rows: Sequence[Row]) -> Bucket | None:
        """The smallest that holds them; None where there is none, or a row is not of a decode."""
        if not rows or any(len(row.tokens) != 1 or row.sample is None for row in rows):
            return None
        context = max(row.start + 1 for row in rows)
        fitting = [bucket for bucket in self._graphs if bucket.holds(len(rows), context)]
        return min(fitting, key=lambda bucket: (bucket.rows, bucket.context), default=None)

    def run(self, rows: Sequence[Row]) -> list[Sampled] | None:
        """What the rows drew. None, where no graph serves them: then nothing has happened but `settle`."""
        places = self._wanted(rows)
        if places is None:
            self.settle()
            bucket = self.find(rows)
            if bucket is None:
                return None
            current, places = self._start(bucket, rows), list(range(len(rows)))
        else:
            assert self._ahead is not None
            current, self._ahead = self._ahead, None
            self.guessed += 1
            self._forget(row for place, row in enumerate(current.rows) if place not in places)
        slots = [-1] * len(current.rows)
        for row, place in zip(rows, places, strict=True):
            slots[place] = row.state
        self._ahead = self._start_ahead(rows, places, slots)
        if self._ahead is None:
            self._fold(slots)
        drawn = [current.drawn.rows[place] for place in places]
        results = self._sampler.results(drawn, current.drawn, places)
        self._given = {
            row.request_id: result.tokens[-1] for row, result in zip(rows, results, strict=True) if result.tokens
        }
        return results

    def settle(self) -> None:
        """Give up the step ahead."""
        if self._ahead is not None:
            self._forget(self._ahead.rows)
            self._ahead = None

    def _forget(self, rows: Iterable[Row]) -> None:
        """For these the device has counted a token that will not be given."""
        for row in rows:
            self._sampler.forget(row.request_id)

    def _wanted(self, rows: Sequence[Row]) -> list[int] | None:
        """Where in the step ahead the rows are; None where one is not, or is to go on otherwise."""
        if self._ahead is None:
            return None
        there = {row.request_id: place for place, row in enumerate(self._ahead.rows)}
        places = []
        for row in rows:
            place = there.get(row.request_id)
            if place is None or tuple(row.tokens) != (self._given.get(row.request_id),) or row.sample is None:
                return None
            guess = self._ahead.rows[place]
            if (guess.start, guess.state) != (row.start, row.state):
                return None
            places.append(place)
        return places

    def _start_ahead(self, rows: Sequence[Row], places: Sequence[int], slots: Sequence[int]) -> _Started | None:
        """Another step of the rows, whose tokens the draw at `places` gives; with it the states move on to the step
        before, of which row n has slot slots[n]."""
        guesses = [replace(row, tokens=(0,), start=row.start + 1, write_from=row.start + 1) for row in rows]
        if any(guess.start >= len(guess.pages) * BLOCK_TOKENS for guess in guesses):
            return None
        bucket = self.find(guesses)
        if bucket is None:
            return None
        if len(slots) > bucket.rows:  # a sequence has ended: the smaller graph cannot move all states on
            self._fold(slots)
            slots = ()
        return self._start(bucket, guesses, places, slots)

    def _start(
        self, bucket: Bucket, rows: Sequence[Row], drawn: Sequence[int] = (), slots: Sequence[int] = ()
    ) -> _Started:
        begin(rows, self._pages, self._states)
        graph = self._graphs[bucket]
        if self._unfolded is not None:
            self._unfolded.fill(slots)
        graph.inputs.fill(rows, drawn)
        sampled = sample_rows(rows)
        self._sampler.prepare(sampled, bucket.rows)
        graph.run()
        return _Started(tuple(rows), self._sampler.fetch(sampled))

    def _fold(self, slots: Sequence[int]) -> None:
        """As the step ahead would have done."""
        if self._unfolded is not None:
            self._unfolded.fill(slots)
            self._unfolded.fold(len(slots))

    def _captured(self, bucket: Bucket) -> _Graph:
        unfolded = self._unfolded
        records = None if unfolded is None else unfolded.records
        inputs = StepInputs(bucket, self._pages, self._states, self._device, records)
        self._sampler.prepare([], bucket.rows)

        def forward() -> None:
            tokens = inputs.tokens(self._sampler.tokens)
            if unfolded is None:
                logits = self._model.forward(tokens, inputs.context)
            else:
                assert isinstance(self._model, HybridDecoder)
                unfolded.fold(bucket.rows)
                hidden = self._model.verify(tokens, inputs.context)
                unfolded.keep(hidden)
                logits = self._model.logits(hidden)
            self._sampler.draw(logits)

        if self._stream is None:
            return _Graph(inputs, forward)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                forward()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            forward()
        return _Graph(inputs, graph.replay)


def buckets(running: int, context: int) -> list[Bucket]:
    """For up to `running` sequences of up to `context` tokens, those first that are wanted most."""
    rows = [1 << power for power in range(max(running - 1, 0).bit_length() + 1)]
    rows[-1] = min(rows[-1], running)
    lengths = sorted({min(_SHORT, context), context}, reverse=True)
    return [Bucket(count, length) for length in lengths for count in rows]


def sample_rows(rows: Sequence[Row]) -> list[SampleRow]:
    """Those that draw, at the position behind their tokens."""
    return [
        SampleRow(row.request_id, row.sample, row.start + len(row.tokens)) for row in rows if row.sample is not None
    ]
