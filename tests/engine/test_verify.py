"""Several tokens of a sequence looked at ahead, of which some are accepted: as if they had been decoded one by one."""

import pytest
import torch

from services.engine.batch import Row
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.model.context import forward_context
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.step_inputs import Bucket, StepInputs
from tests.devices import DEVICES
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.tiny_models import decoder, random_ids

WIDTH = 5
LENGTHS = (62, 7, 100)
"""Of the sequences before; the first crosses a page's border."""


class Sequences:
    """Three of them, prefilled, with pages and states of their own."""

    def __init__(self, model: HybridDecoder) -> None:
        self.model = model
        self.pages = KvPages(KvLayout.of(model.config, model.dtype), 12, model.device)
        self.states = StatePool(StateLayout.of(model.config, model.dtype), 4, model.device)
        self.ids = [random_ids(length + 20, seed=length) for length in LENGTHS]
        self.forward([self.row(which, 0, length) for which, length in enumerate(LENGTHS)])

    def row(self, which: int, start: int, end: int) -> Row:
        ids = self.ids[which]
        pages = [4 * which + page for page in range(-(-end // 64))]
        return Row(str(which), ids[start:end], start, pages, start, None, which)

    def forward(self, rows: list[Row]) -> torch.Tensor:
        """Hidden vectors behind the rows."""
        context = forward_context(rows, self.pages, self.states, self.model.device)
        tokens = torch.tensor([token for row in rows for token in row.tokens]).to(self.model.device)
        self.model.forward(tokens, context)
        return self.states.hidden[[row.state for row in rows]].clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["dense", "dense-three"])
def test_verified_and_folded(kind: str, device: torch.device) -> None:
    model = decoder(hybrid_oracle(kind), device)
    assert isinstance(model, HybridDecoder)
    counts, accepted = (5, 3, 4), (2, 3, 0)
    ahead, plain = Sequences(model), Sequences(model)
    before = ahead.states.tensor.clone()
    bucket = Bucket(4, 128, WIDTH)  # a place more than sequences
    inputs = StepInputs(bucket, ahead.pages, ahead.states, device, model.records(bucket.tokens))
    rows = [ahead.row(which, LENGTHS[which], LENGTHS[which] + count) for which, count in enumerate(counts)]
    inputs.fill(rows)
    recurrent = inputs.context.recurrent
    assert recurrent is not None
    assert recurrent.replay is not None
    replay, nothing = recurrent.replay, torch.empty(1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        logits = model.logits(model.verify(inputs.tokens(nothing), inputs.context))
        assert torch.equal(ahead.states.tensor, before)
        taken = torch.tensor([*accepted, 0], dtype=torch.int32, device=device)
        pool, of = ahead.states, replay.rows
        model.fold(pool.columns, pool.states, of.slots, of.places, taken, replay.records)

    for which, count in enumerate(counts):
        for done in range(count):
            start = LENGTHS[which] + done
            hidden = plain.forward([plain.row(which, start, start + 1)])
            torch.testing.assert_close(logits[which * WIDTH + done], model.logits(hidden)[0], atol=2e-4, rtol=1e-4)
            if done + 1 == accepted[which]:
                for part in ("states", "columns"):
                    got, expected = getattr(ahead.states, part)[which], getattr(plain.states, part)[which]
                    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    untouched = (2, 3)  # nothing accepted, and nobody
    assert torch.equal(ahead.states.tensor[list(untouched)], before[list(untouched)])
