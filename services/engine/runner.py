"""Executes scheduled batches with a real model: one forward pass and one draw a step, transfers beside it."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.batch import Copy, ModelOutput, Row, Sampled, SampleSpec, ScheduledBatch
from services.engine.cache.pages import KvPages
from services.engine.cache.states import StatePool
from services.engine.cache.transfer import PageTransfers
from services.engine.decode_steps import DecodeSteps, sample_rows
from services.engine.model.context import begin, forward_context
from services.engine.model.family import Decoder
from services.engine.sampler import Sampler
from services.protocol.generate import SamplingParams
from services.protocol.hashing import BLOCK_TOKENS

_REHEARSED = (12, 40, 200)
"""Tokens of a step: few and more rows of the kernels for few, and rows enough for those for many."""
_GREEDY = SamplingParams(max_tokens=1, temperature=0)


class ModelRunner:
    """A `Runner` (see batch.py). Owns model, pages, states and transfers from here on; all calls come from one thread.

    They must be made for each other, and lie with the model on `device`.
    """

    def __init__(
        self,
        model: Decoder,
        pages: KvPages,
        transfers: PageTransfers,
        device: torch.device,
        states: StatePool | None = None,
        running: int = 64,
    ) -> None:
        """`states` is None for a model without recurrent states. `running`: rows of a batch at most."""
        self._model = model
        self._pages = pages
        self._states = states
        self._transfers = transfers
        self._device = device
        self._sampler = Sampler(model.config.vocab_size, running, device)
        self._decodes = DecodeSteps(model, pages, states, self._sampler, device)

    @property
    def decodes(self) -> DecodeSteps:
        """Without any captured, all steps are run kernel by kernel."""
        return self._decodes

    def run(self, batch: ScheduledBatch) -> ModelOutput:
        """Raises ValueError for a token id that the model does not have (the server refuses such prompts), IndexError
        for a page or state slot that does not exist, and what torch raises when the device is lost or out of memory.
        """
        # Before the compute: a load needs only what was launched earlier, and gets this step's time as a cover.
        self._transfers.start(batch.transfers)
        started = time.perf_counter()
        with torch.inference_mode():
            self._copy(batch.before)
            sampled = self._compute(batch.rows) if batch.rows else {}
            self._copy(batch.after)
        seconds = time.perf_counter() - started
        progress = self._transfers.poll()
        return ModelOutput(
            step=batch.step,
            sampled=sampled,
            transfers_done=progress.done,
            transfers_failed=progress.failed,
            transfers_pending=progress.pending,
            aux={"compute_seconds": seconds} if batch.rows else {},
        )

    def rehearse(self, most: int) -> None:
        """Prefill up to `most` tokens, and fewer, of nobody: kernels are compiled, and the memory of the largest step
        is known to be there, before the first request asks. To be called while nobody has pages or states. Raises what
        torch raises when the memory is not there."""
        for count in sorted({min(most, size, self._pages.count * BLOCK_TOKENS) for size in (*_REHEARSED, most)}):
            pages = list(range(-(-count // BLOCK_TOKENS)))
            spec = SampleSpec(_GREEDY, [0], [])
            row = Row("rehearsal", [0] * count, 0, pages, 0, spec, 0 if self._states is not None else -1)
            self.run(ScheduledBatch(0, (row,)))
            with torch.inference_mode():
                self._pages.clear(pages)
                if self._states is not None:
                    self._states.clear([0])

    def close(self) -> None:
        self._transfers.close()

    def _compute(self, rows: Sequence[Row]) -> dict[str, Sampled]:
        tokens = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64)
        self._check(tokens)
        if self._states is not None:
            for row in rows:
                self._states.check(row.state)
        drawn = sample_rows(rows)
        results = self._decodes.run(rows)
        if results is None:
            begin(rows, self._pages, self._states)
            context = forward_context(rows, self._pages, self._states, self._device)
            logits = self._model.forward(tokens.to(self._device), context)
            results = []
            if drawn:
                self._sampler.prepare(drawn)
                self._sampler.draw(logits)
                # The wait for the device is in here, as in `run` above: tokens come back to the host.
                results = self._sampler.results(drawn, self._sampler.fetch(drawn))
        return {row.request_id: result for row, result in zip(drawn, results, strict=True)}

    def _check(self, tokens: Tensor) -> None:
        # On CUDA an id out of range would be a device assert, after which the process is lost.
        if not len(tokens):
            return
        low, high = tokens.aminmax()
        if low < 0 or high >= self._model.config.vocab_size:
            bad = int(low if low < 0 else high)
            raise ValueError(f"token {bad} is not in the model's vocabulary of {self._model.config.vocab_size}")

    def _copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if copy.kind == "page":
                self._pages.page(copy.target).copy_(self._pages.page(copy.source))
            elif self._states is None:
                raise ValueError("a state was to be copied, but the model has none")
            else:
                self._states.slot(copy.target).copy_(self._states.slot(copy.source))
