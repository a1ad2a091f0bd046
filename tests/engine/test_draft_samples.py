"""What `python -m bench tiny-drafts` computes: the samples, and the MTP code against the trainer's evaluation."""

import pytest
import torch

from bench.draft_samples import CARD_TOKENS, KINDS, LENGTHS, PROMPTS, SampledShare, measure, sampled_shares
from bench.tiny_drafts import load_small_model
from tools.train.evaluation.draft_prompts import load_prompts


def test_dialogs_that_are_alike_leave_no_doubt() -> None:
    first, second = sampled_shares([[2, 0, 1, 2]] * 5, 3, (0.75, 0.51), samples=50)
    assert first == SampledShare(0.75, 0.75, 0.75, 1.0)
    assert second == SampledShare(0.5, 0.5, 0.5, 0.0)
    assert first.holds(0.75)
    assert not first.holds(0.76)


def test_a_sample_draws_whole_dialogs() -> None:
    """Of 0 of 1, 1 of 1 and 1 of 3 positions: samples of one have nothing between; those of two mix positions."""
    accepted = [[0], [1], [1, 0, 0], []]
    (alone,) = sampled_shares(accepted, 1, (1.0,), samples=4000)
    assert (alone.low, alone.median, alone.high) == pytest.approx((0, 1 / 3, 1))
    assert alone.at_least == pytest.approx(1 / 3, abs=0.03)
    (of_two,) = sampled_shares(accepted, 2, (0.5,), samples=4000)
    # of the nine pairs: 0 and 1 (twice) give 1/2, 1 and 1 of 3 (twice) 2/4, 1 and 1 gives 1
    assert of_two.at_least == pytest.approx(5 / 9, abs=0.03)
    assert sampled_shares(accepted, 2, (0.5,), samples=4000) == [of_two]
    with pytest.raises(ValueError, match="two dialogs"):
        sampled_shares([[1], []], 2, (0.5,))


def test_the_prompts_are_many_and_all_different() -> None:
    prompts = load_prompts(PROMPTS)
    assert [prompt.kind for prompt in prompts] == [kind for kind in KINDS for _ in range(144)]
    assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_drafts_are_those_of_the_trainer_s_evaluation() -> None:
    """Behind code and English, where many drafts are wrong: unlike tool calls, whose drafts are nearly all right."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measured = measure(load_small_model(), prompts=3)
    torch.set_num_threads(threads)
    for kind in KINDS:
        for length in LENGTHS:
            entry = measured[f"{kind}, {length} tokens"]
            assert entry["positions"] == 3 * (length - 3)
            assert entry["dialogs a sample"] * length == CARD_TOKENS
            assert 0.2 < entry["drafts"]["1 to 3"]["accepted"] < 0.98
        differ, positions = map(
            int, measured[f"{kind}, positions where the trainer's evaluation differs"].split(" of ")
        )
        assert positions == 3 * (max(LENGTHS) - 3)
        assert differ <= 0.005 * positions
