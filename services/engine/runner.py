"""Executes scheduled batches with a real model: one forward pass and one draw a step, transfers beside it."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention import plan_attention
from services.engine.batch import ModelOutput, Row, Sampled, ScheduledBatch
from services.engine.cache.pages import KvPages
from services.engine.cache.transfer import PageTransfers
from services.engine.model.dense import DenseDecoder
from services.engine.model.layers import ForwardContext
from services.engine.sampler import SampleRow, sample
from services.protocol.hashing import BLOCK_TOKENS


class ModelRunner:
    """A `Runner` (see batch.py). Owns model, pages and transfers from here on; all calls come from one thread.

    `pages` and `transfers` must be made for each other, and lie with the model on `device`.
    """

    def __init__(self, model: DenseDecoder, pages: KvPages, transfers: PageTransfers, device: torch.device) -> None:
        self._model = model
        self._pages = pages
        self._transfers = transfers
        self._device = device

    def run(self, batch: ScheduledBatch) -> ModelOutput:
        """Raises ValueError for a token id that the model does not have (the server refuses such prompts), and what
        torch raises when the device is lost or out of memory."""
        # Before the compute: a load needs only what was launched earlier, and gets this step's time as a cover.
        self._transfers.start(batch.transfers)
        started = time.perf_counter()
        with torch.inference_mode():
            sampled = self._compute(batch.rows) if batch.rows else {}
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

    def close(self) -> None:
        self._transfers.close()

    def _compute(self, rows: Sequence[Row]) -> dict[str, Sampled]:
        tokens = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64)
        self._check(tokens)
        self._pages.clear(_begun(rows))
        logits = self._model.forward(tokens.to(self._device), self._context(rows))
        # The wait for the device is in here: tokens come back to the host.
        drawn = [
            SampleRow(row.request_id, row.sample, row.start + len(row.tokens)) for row in rows if row.sample is not None
        ]
        results = sample(logits, drawn) if drawn else []
        return {row.request_id: result for row, result in zip(drawn, results, strict=True)}

    def _check(self, tokens: Tensor) -> None:
        # On CUDA an id out of range would be a device assert, after which the process is lost.
        low, high = tokens.aminmax()
        if low < 0 or high >= self._model.config.vocab_size:
            bad = int(low if low < 0 else high)
            raise ValueError(f"token {bad} is not in the model's vocabulary of {self._model.config.vocab_size}")

    def _context(self, rows: Sequence[Row]) -> ForwardContext:
        counts = torch.tensor([len(row.tokens) for row in rows])
        starts = torch.tensor([row.start for row in rows])
        ends = counts.cumsum(0)
        row_of = torch.arange(len(rows)).repeat_interleave(counts)
        positions = torch.arange(int(ends[-1])) - (ends - counts)[row_of] + starts[row_of]

        written = (positions >= torch.tensor([row.write_from for row in rows])[row_of]).nonzero()[:, 0]
        table = torch.tensor([page for row in rows for page in row.pages], dtype=torch.int64)
        sizes = torch.tensor([len(row.pages) for row in rows])
        first_page = (sizes.cumsum(0) - sizes)[row_of[written]]
        pages = table[first_page + positions[written] // BLOCK_TOKENS]

        last = ends - 1
        outputs = last[torch.tensor([row.sample is not None for row in rows])]
        contexts = [row.start + len(row.tokens) for row in rows]
        return ForwardContext(
            positions=positions.to(self._device),
            attention=plan_attention(
                [len(row.tokens) for row in rows],
                contexts,
                [row.pages for row in rows],
                BLOCK_TOKENS,
                self._pages.blank,
                self._device,
            ),
            cache=self._pages.tensor,
            written=None if len(written) == len(positions) else written.to(self._device),
            pages=pages.to(self._device),
            offsets=(positions[written] % BLOCK_TOKENS).to(self._device),
            outputs=outputs.to(self._device),
        )


def _begun(rows: Sequence[Row]) -> list[int]:
    """The pages whose first token is written in this step: what they hold belongs to nobody any more."""
    begun = []
    for row in rows:
        first = -(-max(row.start, row.write_from) // BLOCK_TOKENS)
        begun += row.pages[first : -(-(row.start + len(row.tokens)) // BLOCK_TOKENS)]
    return begun
