"""Rows of every kind for the sampler's kernels, and what the reference makes of them."""

import random

import torch
from torch import Tensor

from kernels import sampling
from kernels.sampling import Adjustment, DrawRow, DrawTable, cells_of

CPU = torch.device("cpu")


def random_rows(count: int, vocabulary: int, device: torch.device, seed: int, adjusted: bool = True) -> list[DrawRow]:
    """A third greedy; limits of all kinds, alone and together."""
    of = random.Random(seed)
    rows = []
    for _ in range(count):
        made = None
        if adjusted and of.random() < 0.5:
            prompt = [of.randrange(vocabulary) for _ in range(20)]
            output = [of.randrange(min(vocabulary, 9)) for _ in range(of.randrange(12))]
            biased = of.sample(range(vocabulary), min(5, vocabulary))
            made = Adjustment(
                cells_of(prompt, output, vocabulary, device) if of.random() < 0.8 else None,
                of.choice([1.0, 1.3, 0.8]),
                of.choice([0.0, 0.5, -1.0]),
                of.choice([0.0, 0.25, 0.1]),
                torch.tensor(biased).to(device),
                torch.tensor([of.choice([-100.0, -1.5, 2.0]) for _ in biased]).to(device),
            )
        rows.append(
            DrawRow(
                temperature=of.choice([0.0, 0.7, 1.3]),
                top_k=of.choice([0, 0, 1, 3, 20, vocabulary - 1, vocabulary, 10 * vocabulary]),
                top_p=of.choice([1.0, 1.0, 0.95, 0.5, 0.07, 1e-9]),
                min_p=of.choice([0.0, 0.0, 0.05, 0.4]),
                uniform=of.choice([of.random(), of.random(), 0.0, 1 - 2**-53]),
                adjustment=made,
            )
        )
    return rows


def random_logits(count: int, vocabulary: int, seed: int) -> Tensor:
    """Every third row of few values, so that many are equal at the borders; forbidden tokens in each."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocabulary, generator=generator) * 2.5 + 7
    logits[1::3] = (logits[1::3] * 2).round() / 2
    logits.masked_fill_(torch.rand(count, vocabulary, generator=generator) < 0.01, -torch.inf)
    return logits


def on(rows: list[DrawRow], device: torch.device) -> list[DrawRow]:
    """Copies of the rows, with cells of their own."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, copy=True)

    copies = []
    for row in rows:
        made = row.adjustment
        if made is not None:
            made = Adjustment(
                moved(made.cells),
                made.repetition,
                made.presence,
                made.frequency,
                moved(made.bias_ids),
                moved(made.bias),
            )
        copies.append(DrawRow(row.temperature, row.top_k, row.top_p, row.min_p, row.uniform, made))
    return copies


def expected(logits: Tensor, rows: list[DrawRow], capacity: int) -> tuple[Tensor, Tensor, list[DrawRow]]:
    """The reference's tokens [capacity], adjusted logits, and rows with their cells after it."""
    copies, adjusted = on(rows, CPU), logits.cpu().clone()
    table, tokens = DrawTable(capacity, CPU), torch.full((capacity,), -7)
    table.fill(copies)
    sampling.draw_rows(adjusted, table, torch.empty(0), tokens)
    return tokens, adjusted, copies


def check_cells(rows: list[DrawRow], exact: list[DrawRow]) -> None:
    for row, other in zip(rows, exact, strict=True):
        if row.adjustment is not None and other.adjustment is not None and row.adjustment.cells is not None:
            assert other.adjustment.cells is not None
            assert torch.equal(row.adjustment.cells.cpu(), other.adjustment.cells)
