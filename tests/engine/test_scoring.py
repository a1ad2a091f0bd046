"""The bench's view of how probable a model finds a text, against transformers."""

import math

import pytest
import torch

from bench.scoring import Score, is_greedy, log_probabilities
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.tiny_models import decoder, oracle, oracle_logits, random_ids


@pytest.mark.parametrize("shape", ["llama", "dense"])
def test_scores_are_those_of_transformers(shape: str) -> None:
    model = hybrid_oracle(shape) if shape == "dense" else oracle(shape)
    ours = decoder(model)
    ids = random_ids(90, seed=1)
    expected = oracle_logits(model, ids).log_softmax(-1)
    found = log_probabilities(ours, ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(log_probabilities(ours, ids, 70), found[70:], atol=1e-5, rtol=0)
    score = Score.of(found, ids)
    losses = [-expected[at, ids[at + 1]].item() for at in range(89)]
    assert score.perplexity == pytest.approx(math.exp(sum(losses) / 89), rel=1e-4)
    answer = list(ids[:5])
    for _ in range(4):
        answer.append(int(oracle_logits(model, answer)[-1].argmax()))
    assert is_greedy(ours, answer[:5], answer[5:])
    assert not is_greedy(ours, answer[:5], [*answer[5:8], (answer[8] + 1) % 97])


def test_divergence() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    base, other = Score(p, 0.0), Score(q, 0.0)
    assert base.divergence_from(base) == 0
    assert other.divergence_from(base) == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
