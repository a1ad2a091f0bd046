"""Long contexts in no time: a runner that lets prompts be random K, V and states in place of computing them."""

from dataclasses import replace

import torch

from kernels import kv_codec
from services.engine.batch import ModelOutput, Row, Runner, Sampled, ScheduledBatch
from services.engine.cache.pages import KvPages
from services.engine.cache.states import StatePool
from services.protocol.hashing import BLOCK_TOKENS

_TEMPLATES = 64
"""Pages of random K and V, each of other numbers; contexts are copies of them."""
_STATE_SPREAD = 0.05


class FilledContexts:
    """A `Runner` in front of the model's. Rows of several tokens are parts of prompts: their pages are filled and,
    where their prompt ends, the state is drawn and a token answered. All other rows go to the model, which cannot tell
    such a context from one that it has read: as many pages of its own, as many bytes a step.

    Prompts are of whole pages, so that nothing lies behind their ends. Owns nothing: `close` leaves the inner runner
    open.
    """

    def __init__(self, runner: Runner, pages: KvPages, states: StatePool) -> None:
        """Writes to the first pages, which nobody may hold now. To be called under torch.inference_mode."""
        self._runner = runner
        self._pages = pages
        self._states = states
        count = min(_TEMPLATES, pages.count)
        device, layout = pages.tensor.device, pages.layout
        places = torch.arange(count * BLOCK_TOKENS, device=device)
        for layer in pages.layers:
            k, v = torch.randn(2, len(places), layout.kv_heads, layout.head_dim, dtype=layout.dtype, device=device)
            kv_codec.write(layer, k, v, places // BLOCK_TOKENS, places % BLOCK_TOKENS)
        self._templates = pages.tensor[:count].clone()

    def run(self, batch: ScheduledBatch) -> ModelOutput:
        """Raises ValueError for a prompt that is not of whole pages."""
        prompts = [row for row in batch.rows if len(row.tokens) > 1]
        if not prompts:
            return self._runner.run(batch)
        with torch.inference_mode():
            for row in prompts:
                self._fill(row)
        output = ModelOutput(batch.step, {})
        if len(prompts) < len(batch.rows) or batch.before or batch.after or batch.transfers:
            rest = tuple(row for row in batch.rows if len(row.tokens) <= 1)
            output = self._runner.run(replace(batch, rows=rest))
        answered = {row.request_id: Sampled((row.tokens[-1],)) for row in prompts if row.sample is not None}
        return replace(output, sampled={**output.sampled, **answered})

    def close(self) -> None:
        pass

    def _fill(self, row: Row) -> None:
        end = row.start + len(row.tokens)
        if row.start % BLOCK_TOKENS or end % BLOCK_TOKENS:
            raise ValueError(f"tokens {row.start} to {end} of a prompt are not whole pages")
        pages = torch.tensor(row.pages[row.start // BLOCK_TOKENS : end // BLOCK_TOKENS]).to(self._pages.tensor.device)
        for some in pages.split(len(self._templates)):
            self._pages.tensor[some] = self._templates[: len(some)]
        if row.sample is not None:
            self._states.states[row.state].normal_(0, _STATE_SPREAD)
            self._states.columns[row.state].normal_()
            self._states.hidden[row.state].normal_()
