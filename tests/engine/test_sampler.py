"""The sampler against the formulas of SamplingParams, written down again in plain NumPy."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import sampling
from services.engine import sampler
from services.engine.adjustments import Adjustments
from services.engine.batch import Sampled, SampleSpec
from services.engine.sampler import Sampler, SampleRow, sample, uniform
from services.protocol.generate import SamplingParams
from tests.devices import DEVICES

VOCAB = 40


def expected_token(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], u: float
) -> int:
    x = np.array(logits, dtype=np.float32)
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / np.float32(params.repetition_penalty)
            if x[token] > 0
            else x[token] * np.float32(params.repetition_penalty)
        )
    for token in set(output):
        x[token] -= np.float32(params.presence_penalty + params.frequency_penalty * list(output).count(token))
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    if params.temperature == 0:
        return int(x.argmax())
    scaled = x.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    keep = np.ones(len(p), dtype=bool)
    if params.top_k:
        keep &= np.array([(p > q).sum() < params.top_k for q in p])
    p = np.where(keep, p, 0)
    p /= p.sum()
    if params.top_p < 1:
        keep &= np.array([p[p > q].sum() < params.top_p for q in p]) | (p == p.max())
    keep &= p >= params.min_p * p.max()
    p = np.where(keep, p, 0)
    p /= p.sum()
    return int(np.searchsorted(np.cumsum(p), u, side="right"))


def draw_one(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    position: int = 0,
) -> Sampled:
    rows = [SampleRow("r", SampleSpec(params, prompt, output), position)]
    return sample(torch.tensor([list(logits)], dtype=torch.float32), rows)[0]


logit_lists = st.lists(st.integers(-60, 60).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
params_of_all_kinds = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 39, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.93, 0.5, 0.07, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(logits=logit_lists, params=params_of_all_kinds, prompt=token_lists, output=token_lists)
def test_equals_the_plain_formula(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    """Logits of few distinct values, so that ties at every border are common."""
    position = len(prompt) + len(output)
    u = uniform(params.seed, position)
    got = draw_one(logits, params, prompt, output, position)
    assert got == Sampled((expected_token(logits, params, prompt, output, u),))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_batch_and_order_do_not_matter(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 9))
    logits = [data.draw(logit_lists) for _ in range(count)]
    specs = [SampleSpec(data.draw(params_of_all_kinds), data.draw(token_lists), []) for _ in range(count)]
    alone = [
        sample(torch.tensor([row]), [SampleRow("r", spec, n)])[0]
        for n, (row, spec) in enumerate(zip(logits, specs, strict=True))
    ]
    order = data.draw(st.permutations(range(count)))
    together = sample(torch.tensor([logits[n] for n in order]), [SampleRow(f"r{n}", specs[n], n) for n in order])
    assert together == [alone[n] for n in order]


@pytest.mark.parametrize("device", DEVICES)
def test_distribution(device: torch.device) -> None:
    """Chi-square of 20,000 draws at as many positions: the 0.1% point with 9 degrees of freedom is 27.9."""
    logits = torch.linspace(0, 2.5, 10).repeat(20_000, 1)
    spec = SampleSpec(SamplingParams(max_tokens=1, temperature=0.8, seed=99), [], [])
    results = sample(logits.to(device), [SampleRow("r", spec, position) for position in range(20_000)])
    counts = np.bincount([result.tokens[0] for result in results], minlength=10)
    p = torch.softmax(torch.linspace(0, 2.5, 10).double() / 0.8, -1).numpy()
    assert float(((counts - 20_000 * p) ** 2 / (20_000 * p)).sum()) < 27.9


def test_uniform_numbers() -> None:
    """Evenly spread over positions and over seeds, neighbours unrelated; and fixed for ever: answers depend on it."""
    for numbers in (
        np.array([uniform(12, position) for position in range(10_000)]),
        np.array([uniform(seed, 3) for seed in range(10_000)]),
    ):
        counts = np.bincount((numbers * 20).astype(int), minlength=20)
        assert float(((counts - 500.0) ** 2 / 500.0).sum()) < 43.8  # 0.1% of 19 degrees of freedom
        assert abs(float(np.corrcoef(numbers[:-1], numbers[1:])[0, 1])) < 0.04
        assert 0 <= numbers.min() <= numbers.max() < 1
    # Seed and position do not just add up.
    assert uniform(1, 2) != uniform(2, 1)
    assert uniform(5, 6) != uniform(4, 7)
    # splitmix64's published first output for the state 0.
    assert sampler._splitmix64(0) == 0xE220A8397B1DCDAF
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_ends_with_error(
    bad: float, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 7] = bad
    logits[0, 3] = logits[2, 5] = 50.0
    params = SamplingParams(max_tokens=1, temperature=temperature)
    rows = [SampleRow(f"request-{n}", SampleSpec(params, [], []), 4) for n in range(3)]
    assert sample(logits, rows) == [Sampled((3,)), Sampled((), finish="error"), Sampled((5,))]
    assert "request-1" in caplog.text


def test_all_tokens_forbidden_is_an_error_too() -> None:
    assert draw_one([-math.inf] * VOCAB, SamplingParams(max_tokens=1)).finish == "error"


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = [0.0] * VOCAB
    logits[4] = logits[0] = logits[VOCAB - 1] = -math.inf
    for position in range(200):
        (token,) = draw_one(logits, SamplingParams(max_tokens=1, seed=3), position=position).tokens
        assert token not in (0, 4, VOCAB - 1)


def test_greedy_takes_the_first_of_equals() -> None:
    assert draw_one([1.0, 5.0, 5.0], SamplingParams(max_tokens=1, temperature=0)).tokens == (1,)


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_tiny_temperature_is_greedy_and_not_nan(temperature: float) -> None:
    logits = [-1e30, 3.0, 4.0, 1.0]
    assert draw_one(logits, SamplingParams(max_tokens=1, temperature=temperature)).tokens == (2,)


def test_bias_outside_the_vocabulary_is_ignored() -> None:
    params = SamplingParams(max_tokens=1, temperature=0, logit_bias={-1: 100.0, VOCAB: 100.0, 3: 1.0})
    assert draw_one([0.0] * VOCAB, params).tokens == (3,)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_a_kept_token(u: float) -> None:
    """Whatever the total of the weights is, rounding never carries the draw over it."""
    lower = torch.linspace(-8, 0, 500)
    logits = torch.stack([torch.full_like(lower, -9000), torch.zeros(500), lower, torch.full_like(lower, -9000)], dim=1)
    one = torch.ones(500, dtype=torch.float64)
    tokens = sampling.draw(logits, one, torch.zeros(500, dtype=torch.int64), one, 0 * one, u * one)
    assert set(tokens.tolist()) == {1 if u == 0 else 2}


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_vocabulary(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """top_p that needs few tokens, and one that needs more than are looked at first; rows in several groups."""
    monkeypatch.setattr(sampling, "_MAX_ELEMENTS", 3 * 40_000)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 40_000, generator=generator)
    cases = [(0.02, 0), (0.9, 0), (0.9, 50), (1.0, 2000)]
    params = [
        SamplingParams(max_tokens=1, temperature=1.1, top_p=p, top_k=k, seed=n) for n in range(2) for p, k in cases
    ]
    rows = [SampleRow("r", SampleSpec(param, [], []), 10) for param in params]
    got = sample(logits.clone().to(device), rows)
    for row, param, result in zip(logits, params, got, strict=True):
        p = torch.softmax(row.double() / 1.1, -1)
        order = p.argsort(descending=True)
        kept = order[: param.top_k or None]
        share = p[kept] / p[kept].sum()
        kept = kept[(share.cumsum(0) - share) < param.top_p].sort().values
        cumulative = (p[kept] / p[kept].sum()).cumsum(0)
        assert result.tokens == (int(kept[torch.searchsorted(cumulative, uniform(param.seed, 10), right=True)]),)


# The sampler that is kept from step to step.


def drawn_by(sampler: Sampler, logits: torch.Tensor, rows: list[SampleRow], bucket: int | None = None) -> list[Sampled]:
    sampler.prepare(rows, bucket)
    sampler.draw(logits)
    return sampler.results(rows, sampler.fetch(rows))


PENALIZED = SamplingParams(
    max_tokens=1,
    temperature=0.9,
    top_p=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.25,
    logit_bias={3: 1.5, VOCAB + 7: 9.0},
    seed=5,
)


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_over_many_steps(device: torch.device) -> None:
    """As counted anew from the whole answer each time; with steps in which the request does not run, one in which its
    answer went on with tokens that were not drawn, and a resume on another engine."""
    sampler, prompt, output = Sampler(VOCAB, 4, device), [1, 2, 2, 30], []
    generator = torch.Generator().manual_seed(1)
    plain = SampleRow("plain", SampleSpec(SamplingParams(max_tokens=1, temperature=0), [], []), 0)
    for step in range(30):
        if step == 12:
            output[-1:] = [7, 7, 8]
        if step == 20:
            sampler = Sampler(VOCAB, 4, device)
        logits = torch.randn(4, VOCAB, generator=generator)
        rows = [plain] if step % 5 == 4 else [plain, SampleRow("r", SampleSpec(PENALIZED, prompt, output), step)]
        results = drawn_by(sampler, logits.clone().to(device), rows, 4)
        assert results[0] == Sampled((int(logits[0].argmax()),))
        assert sampler.tokens[len(rows) :].tolist() == [0] * (4 - len(rows))
        if len(rows) == 2:
            u = uniform(PENALIZED.seed, step)
            known = msgspec.structs.replace(PENALIZED, logit_bias={3: 1.5})
            assert results[1] == Sampled((expected_token(logits[1].tolist(), known, prompt, output, u),))
            output += results[1].tokens
    assert len(set(output)) > 3


def test_a_step_that_is_prepared_before_the_results_of_the_last() -> None:
    """The answer that it is told then lacks a token, which the device has counted."""
    sampler, output = Sampler(VOCAB, 1, torch.device("cpu")), []
    params = SamplingParams(max_tokens=1, temperature=0, presence_penalty=0.75, frequency_penalty=0.5)
    rows = [SampleRow("r", SampleSpec(params, [], output), 0)]
    logits = torch.linspace(0, 4, VOCAB)[None]
    sampler.prepare(rows)
    drawn = []
    for _ in range(12):
        sampler.draw(logits.clone())
        fetched = sampler.fetch(rows)
        sampler.prepare(rows)
        drawn += sampler.results(rows, fetched)[0].tokens
        output[:] = drawn
    assert drawn == [draw_one(logits[0].tolist(), params, [], drawn[:n]).tokens[0] for n in range(12)]


def test_no_more_requests_are_kept_than_rows() -> None:
    kept = Adjustments(VOCAB, 2, torch.device("cpu"))
    plain = SampleSpec(SamplingParams(max_tokens=1), [1], [])
    spec = SampleSpec(PENALIZED, [1], [])
    assert kept.of("plain", plain) is None
    first = kept.of("first", spec)
    kept.of("second", spec)
    assert kept.of("first", spec) is first
    kept.of("third", spec)
    assert len(kept) == 2
    assert kept.of("first", spec) is first
    kept.forget("first")
    assert len(kept) == 1
    assert kept.of("first", spec) is not first
    biased = kept.of("biased", SampleSpec(SamplingParams(max_tokens=1, logit_bias={1: 2.0}), [1], []))
    assert biased is not None
    assert biased.cells is None


def test_more_rows_than_there_are() -> None:
    sampler = Sampler(VOCAB, 2, torch.device("cpu"))
    rows = [SampleRow("r", SampleSpec(SamplingParams(max_tokens=1), [], []), 0)] * 3
    for bucket in (None, 1, 4):
        with pytest.raises(ValueError, match="3 rows"):
            sampler.prepare(rows, bucket)
