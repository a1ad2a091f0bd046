"""Decode steps as captured CUDA graphs: one launch for a thousand kernels, which the host could not start as fast as
the GPU runs them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.engine.batch import Row
from services.engine.cache.pages import KvPages
from services.engine.cache.states import StatePool
from services.engine.model.family import Decoder
from services.engine.sampler import Sampler, SampleRow
from services.engine.step_inputs import Bucket, StepInputs

log = logging.getLogger(__name__)

_SHORT = 8192
"""Tokens of context up to which smaller page tables and fewer programs of attention do."""
_WARM_UPS = 2
"""Before a capture: kernels are compiled, and libraries take their workspaces."""


@dataclass(frozen=True, slots=True)
class _Step:
    inputs: StepInputs
    run: Callable[[], object]
    """Everything between the inputs and the sampler's tokens, enqueued."""


class DecodeGraphs:
    """The steps that are there, by bucket. All calls come from one thread at a time; what they enqueue goes to the
    current stream."""

    def __init__(
        self, model: Decoder, pages: KvPages, states: StatePool | None, sampler: Sampler, device: torch.device
    ) -> None:
        """On a CPU nothing is captured, and the same step runs as it is."""
        self._model = model
        self._pages = pages
        self._states = states
        self._sampler = sampler
        self._device = device
        self._steps: dict[Bucket, _Step] = {}
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._pool = torch.cuda.graph_pool_handle() if cuda else None

    def capture(self, buckets: Sequence[Bucket], seconds: float, progress: Callable[[float, str], None]) -> None:
        """One after the other, until the time is up: steps without a graph are still run, kernel by kernel."""
        until = time.monotonic() + seconds
        for done, bucket in enumerate(buckets):
            if time.monotonic() > until:
                log.warning(
                    "%d of %d decode graphs captured in %.0f s; the others are left out", done, len(buckets), seconds
                )
                return
            progress(done / len(buckets), f"capturing decode steps of {bucket.rows} x {bucket.context} tokens")
            self._steps[bucket] = self._captured(bucket)

    def find(self, rows: Sequence[Row]) -> Bucket | None:
        """The smallest that holds them; None where there is none, or a row is not of a decode."""
        if any(len(row.tokens) != 1 or row.sample is None for row in rows):
            return None
        context = max(row.start + 1 for row in rows)
        fitting = [bucket for bucket in self._steps if bucket.holds(len(rows), context)]
        return min(fitting, key=lambda bucket: (bucket.rows, bucket.context), default=None)

    def run(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        """Enqueue the step; the sampler has its results."""
        step = self._steps[bucket]
        step.inputs.fill(rows)
        self._sampler.prepare(sample_rows(rows), bucket.rows)
        step.run()

    def _captured(self, bucket: Bucket) -> _Step:
        inputs = StepInputs(bucket, self._pages, self._states, self._device)
        self._sampler.prepare([], bucket.rows)

        def forward() -> None:
            self._sampler.draw(self._model.forward(inputs.tokens, inputs.context))

        if self._stream is None:
            return _Step(inputs, forward)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                forward()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            forward()
        return _Step(inputs, graph.replay)


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
