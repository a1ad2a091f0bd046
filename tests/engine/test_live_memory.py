"""The meter that the workspace is checked against."""

import torch

from tests.engine.live_memory import LiveMemory


def test_counts_what_lives() -> None:
    with LiveMemory() as memory:
        first = torch.empty(100)
        both = torch.cat([first, torch.empty(50)])
        del first
        assert both.view(3, 50).add_(1.0).shape == (3, 50)
        assert memory.now == 4 * 150
    assert memory.peak == 4 * 300


def test_an_address_that_held_what_does_not_count_is_counted() -> None:
    """PyTorch makes the storage of `torch.tensor` before it dispatches; its address goes to whatever comes next."""
    with LiveMemory() as memory:
        for _ in range(100):
            unseen = torch.tensor([0.0] * 100)
            assert float(unseen.sum()) == 0.0
            before = memory.now
            del unseen
            counted = torch.empty(100)
            assert memory.now - before == 4 * 100
            del counted
