"""A decode step as a graph runs it: padded to its bucket, everything read from memory that stays where it is. On a GPU
captured and replayed, on a CPU the same step as it is."""

from collections.abc import Sequence

import pytest
import torch

from services.engine.batch import Row, Sampled, SampleSpec, ScheduledBatch
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.cache.transfer import page_transfers
from services.engine.decode_steps import buckets
from services.engine.model.dense import DenseDecoder
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.runner import ModelRunner
from services.engine.step_inputs import Bucket
from services.protocol.generate import SamplingParams
from tests.devices import DEVICES
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.tiny_models import decoder, oracle, random_ids

PARAMS = [
    SamplingParams(max_tokens=1, temperature=0),
    SamplingParams(max_tokens=1, temperature=1.1, top_p=0.9, seed=3),
    SamplingParams(max_tokens=1, temperature=0.8, top_k=20, presence_penalty=0.7, seed=9),
]


class Engine:
    """Sequences that decode beside each other, each with pages and a state of its own."""

    def __init__(self, model: DenseDecoder | HybridDecoder, shapes: Sequence[Bucket] = ()) -> None:
        self.pages = KvPages(KvLayout.of(model.config, model.dtype), 16, model.device)
        self.states = None
        if isinstance(model.config, HybridConfig):
            self.states = StatePool(StateLayout.of(model.config, model.dtype), 4, model.device)
        transfers = page_transfers(self.pages, self.states)
        self.runner = ModelRunner(model, self.pages, transfers, model.device, self.states, running=4)
        self.runner.decodes.capture(shapes, 600.0, lambda _, __: None)
        self.sequences = [random_ids(length, seed=length) for length in (61, 5, 130)]
        self.prompts = [len(ids) for ids in self.sequences]
        self.done = [0, 0, 0]
        self.steps = 0
        self.after: list[dict[str, Sampled]] = []

    def row(self, which: int) -> Row:
        """All that the sequence has not run yet, or its newest token."""
        ids, start, prompt = self.sequences[which], self.done[which], self.prompts[which]
        spec = SampleSpec(PARAMS[which], ids[:prompt], ids[prompt:])
        # With that of the next token, as the scheduler has it where pages are plenty.
        pages = [5 * which + page for page in range(-(-(len(ids) + 1) // 64))]
        state = -1 if self.states is None else which
        return Row(f"r{which}", ids[start:], start, pages, start, spec, state)

    def step(self, *which: int) -> dict[str, Sampled]:
        self.steps += 1
        output = self.runner.run(ScheduledBatch(self.steps, tuple(self.row(sequence) for sequence in which)))
        for sequence in which:
            self.done[sequence] = len(self.sequences[sequence])
            self.sequences[sequence] += output.sampled[f"r{sequence}"].tokens
        return dict(output.sampled)

    def memory(self) -> list[torch.Tensor]:
        """What the sequences have: their K and V, and all states. What lies in a page behind a sequence's end is
        nobody's."""
        held = [] if self.states is None else [self.states.states, self.states.columns, self.states.hidden]
        for which, done in enumerate(self.done):
            at = torch.arange(done, device=self.pages.tensor.device)
            for layer in self.pages.layers:
                held += [rows.codes[5 * which + at // 64, at % 64] for rows in (layer.keys, layer.values)]
        return held


def models(kind: str, device: torch.device) -> DenseDecoder | HybridDecoder:
    return decoder(oracle("llama", head_dim=16) if kind == "llama" else hybrid_oracle(kind), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "dense", "dense-three"])
def test_graphs_give_what_the_kernels_give_one_by_one(kind: str, device: torch.device) -> None:
    """Over page borders and changing batches; bit for bit where a step has the rows that were guessed: in another batch
    a CPU rounds otherwise."""
    model = models(kind, device)
    shapes = [Bucket(1, 256), Bucket(2, 256), Bucket(3, 256)]
    plain, graphed = Engine(model), Engine(model, shapes)
    steps = [(0, 1, 2)] * 6 + [(2, 0)] * 2 + [(1,)] * 4 + [(1, 2, 0)] * 3 + [(0, 1, 2), (1, 2), (1, 2), (2,)]
    for number, which in enumerate(steps):
        assert plain.step(*which) == graphed.step(*which)
        for expected, got in zip(plain.memory(), graphed.memory(), strict=True):
            if number < 6:
                assert torch.equal(expected, got)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    # All but the prefill, the first decode, and two with a sequence that was not there in the step before.
    assert plain.runner.decodes.guessed == 0
    assert graphed.runner.decodes.guessed == len(steps) - 4


@pytest.mark.parametrize("device", DEVICES)
def test_a_guess_that_was_wrong(device: torch.device) -> None:
    """Another token than the draw's, as a limit of thoughts has it; a sequence that ends, one that comes; a sequence
    that goes on from its checkpoint, which is what its state was before the step ahead."""
    model = models("dense", device)
    plain, graphed = Engine(model), Engine(model, [Bucket(3, 256)])
    for engine in (plain, graphed):
        engine.step(0, 1, 2)
        for _ in range(3):
            engine.step(0, 1, 2)
        assert engine.states is not None
        kept = engine.states.slot(1).clone()
        engine.sequences[1][-1] = 17
        after = [engine.step(0, 1, 2) for _ in range(2)]
        engine.states.slot(1).copy_(kept)
        engine.sequences[1] = [*engine.sequences[1][:-3], 23]
        engine.done[1] -= 2
        after += [engine.step(1, 2), engine.step(2, 0), engine.step(2, 0)]
        engine.after = after
    assert plain.after == graphed.after
    for expected, got in zip(plain.memory(), graphed.memory(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_nobody(device: torch.device) -> None:
    """Fewer rows than the graph has places: their results do not depend on it, and nothing else is touched."""
    model = models("dense", device)
    alone, padded = Engine(model), Engine(model, [Bucket(4, 256)])
    for engine in (alone, padded):
        engine.step(0, 1, 2)
    assert padded.states is not None
    pages, states = padded.pages.tensor.clone(), padded.states.tensor.clone()
    for _ in range(5):
        assert alone.step(1) == padded.step(1)
    assert torch.equal(padded.pages.tensor[:5], pages[:5])
    assert torch.equal(padded.pages.tensor[6:], pages[6:])
    assert torch.equal(padded.states.tensor[[0, 2, 3]], states[[0, 2, 3]])
    assert not torch.equal(padded.states.tensor[1], states[1])


def test_the_smallest_bucket_that_holds_the_step() -> None:
    engine = Engine(models("dense", torch.device("cpu")), [Bucket(1, 128), Bucket(4, 128), Bucket(4, 256)])
    find = engine.runner.decodes.find
    assert find([engine.row(1)]) is None  # a prefill
    engine.step(0, 1, 2)
    assert find([engine.row(1)]) == Bucket(1, 128)
    assert find([engine.row(0), engine.row(1)]) == Bucket(4, 128)
    assert find([engine.row(2)]) == Bucket(4, 256)
    assert find([engine.row(0), engine.row(2)]) == Bucket(4, 256)


def test_buckets_of_an_engine() -> None:
    assert buckets(5, 100_000) == [Bucket(rows, length) for length in (100_000, 8320) for rows in (1, 2, 4, 5)]
    assert buckets(1, 4096) == [Bucket(1, 4096)]


def test_time_that_is_up_leaves_steps_without_a_graph() -> None:
    engine = Engine(models("llama", torch.device("cpu")))
    engine.runner.decodes.capture([Bucket(1, 256)], -1.0, lambda _, __: None)
    engine.step(1)
    assert engine.runner.decodes.find([engine.row(1)]) is None
    assert engine.step(1)["r1"].tokens


def test_a_state_that_does_not_exist() -> None:
    engine = Engine(models("dense", torch.device("cpu")), [Bucket(1, 256)])
    engine.step(1)
    row = engine.row(1)
    wrong = Row(row.request_id, row.tokens, row.start, row.pages, row.write_from, row.sample, 4)
    with pytest.raises(IndexError, match="state 4 of 4"):
        engine.runner.run(ScheduledBatch(9, (wrong,)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "dense"])
def test_a_rehearsal_leaves_nothing(kind: str, device: torch.device) -> None:
    model = models(kind, device)
    fresh, rehearsed = Engine(model, [Bucket(2, 256)]), Engine(model, [Bucket(2, 256)])
    rehearsed.runner.rehearse(300)
    assert not rehearsed.pages.tensor.any()
    assert rehearsed.states is None or not rehearsed.states.tensor.any()
    for _ in range(4):
        assert fresh.step(0, 1) == rehearsed.step(0, 1)
