"""How well the model predicts held-out text: bits per byte."""

import math

import numpy as np
import torch

from tools.train.data.dataset import Dataset, TextKind
from tools.train.layers import head_loss
from tools.train.model import TrainModel


@torch.no_grad()
def bits_per_byte(
    model: TrainModel, dataset: Dataset, kind: TextKind, row_length: int = 2048, most_rows: int | None = None
) -> float:
    """Over whole rows of the dataset's text; the first token of each row is not predicted. Raises ValueError for less
    text than one row."""
    tokens = dataset.texts[kind]
    rows = len(tokens) // row_length
    if rows == 0:
        raise ValueError(f"{kind}: {len(tokens)} tokens of {dataset.split} text are less than a row of {row_length}")
    rows = min(rows, most_rows or rows)
    total = torch.zeros((), device=model.device)
    for first in range(0, rows, 16):
        last = min(first + 16, rows)
        block = np.asarray(tokens[first * row_length : last * row_length]).astype(np.int64)
        ids = torch.from_numpy(block).to(model.device).view(-1, row_length)
        weights = (torch.arange(ids.numel(), device=model.device) % row_length != row_length - 1).float()
        targets = torch.roll(ids, -1, 1).reshape(-1)
        loss, _ = head_loss(model.body(ids), model.parameters["model.norm.weight"], model.head, targets, weights)
        total += loss
    bits = total.item() / math.log(2) / (rows * (row_length - 1))
    size = dataset.sizes[kind]
    return bits * size.tokens / size.bytes
