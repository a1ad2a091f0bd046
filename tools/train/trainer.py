"""The training loop."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.train import hopper
from tools.train.checkpoint import Parameters, save_model
from tools.train.delta_rule import gradient_errors
from tools.train.layers import PLAIN, Pieces
from tools.train.model import TrainModel
from tools.train.optimizer import Optimizer
from tools.train.schedule import Rate
from tools.train.shape import ModelShape
from tools.train.stream import StepBatches, StreamOptions, open_stream

DRAFT_STEPS = 2
LONGEST_DRAFT_ROWS = 8192
"""Longer rows train the body alone."""
LOG_STEPS = 50
SAVE_SECONDS = 120
LARGEST_GRADIENT_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class TrainOptions:
    stream: StreamOptions
    rate: Rate
    out: Path
    files_from: Path
    """A model folder whose tokenizer and template the new one takes."""
    workers: int
    deadline: float = math.inf
    """Seconds after the start at which the training must be over. If the steps would take longer, the learning rate
    falls earlier, by the clock, and the last steps are left out: such a run cannot be repeated bit for bit."""


class TrainingError(RuntimeError):
    """The machine computes wrong gradients, or the loss is no number."""


def train(
    options: TrainOptions,
    shape: ModelShape,
    parameters: Parameters,
    device: torch.device,
    log: Callable[[str], None] = print,
) -> TrainModel:
    """Trains a copy of the parameters and saves it to options.out, also every 2 minutes. Each LOG_STEPS a line goes
    to options.out/training.jsonl. Repeatable on the CPU with the same number of threads; on CUDA the data are the same,
    but atomic additions in the gradients of attention and embedding have no order. Raises TrainingError."""
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    pieces = prepare_device(device, log)
    model = TrainModel(shape, parameters, device)
    optimizer = Optimizer(model.parameters, options.rate.peak)
    journal = Journal(options.out / "training.jsonl", device, log)
    saved = time.monotonic()
    steps = options.stream.steps
    step = 0
    with open_stream(options.stream, options.workers) as batches:
        while step < steps:
            progress = max(step / steps, (time.monotonic() - started) / options.deadline)
            if progress >= 1:
                log(f"deadline: stopped after {step} of {steps} steps")
                break
            waited = time.monotonic()
            batch = next(batches)
            journal.waited += time.monotonic() - waited
            accumulate(model, batch, pieces, journal)
            optimizer.step(options.rate.scale(step, progress))
            step += 1
            if step % LOG_STEPS == 0 or step == steps:
                journal.write(step)
            if time.monotonic() - saved > SAVE_SECONDS:
                save_model(options.out, shape, model.parameters, options.files_from)
                saved = time.monotonic()
    save_model(options.out, shape, model.parameters, options.files_from)
    log(f"trained {step} steps in {time.monotonic() - started:.0f} s; saved to {options.out}")
    return model


def prepare_device(device: torch.device, log: Callable[[str], None]) -> Pieces:
    """Checks the gradients of the fast path on CUDA before anything is trained with them."""
    if device.type != "cuda":
        return PLAIN
    hopper.prepare()
    errors = gradient_errors(device)
    log("gated delta net, relative errors: " + ", ".join(f"{name} {error:.4f}" for name, error in errors.items()))
    if not max(errors.values()) < LARGEST_GRADIENT_ERROR:
        raise TrainingError(f"the gated delta net's gradients are wrong on this machine: {errors}")
    return Pieces.compiled()


def accumulate(model: TrainModel, batches: StepBatches, pieces: Pieces, journal: "Journal") -> None:
    """Adds the gradients of one step: the weighted mean loss over all its micro-batches."""
    total_weight = max(1.0, sum(float(batch.weights.sum()) for batch in batches))  # a tiny batch may be all prompt
    for batch in batches:
        ids = torch.from_numpy(batch.ids).to(model.device, torch.long)
        weights = torch.from_numpy(batch.weights).to(model.device)
        with_drafts = ids.shape[1] <= LONGEST_DRAFT_ROWS
        losses = model.losses(ids, weights, DRAFT_STEPS if with_drafts else 0, pieces)
        (losses.total / total_weight).backward()
        journal.tokens += ids.numel()
        if with_drafts:
            journal.add(torch.stack([losses.weight, losses.main, *losses.drafts]).detach())


class Journal:
    """Means of the losses since the last line, over the rows that train the MTP layer too."""

    def __init__(self, path: Path, device: torch.device, log: Callable[[str], None]) -> None:
        self.tokens = 0
        """Since the start."""
        self.waited = 0.0
        """Seconds for data, since the start."""
        self._path = path
        self._log = log
        self._started = time.monotonic()
        self._sums = torch.zeros(2 + DRAFT_STEPS, device=device)
        path.write_text("")

    def add(self, sums: Tensor) -> None:
        """[weight, main loss, draft losses...]; stays on the device, no waiting for it."""
        self._sums += sums

    def write(self, step: int) -> None:
        """One line to the file and the log. Raises TrainingError if the loss is not finite."""
        weight, *losses = self._sums.tolist()
        self._sums.zero_()
        main, *drafts = (loss / max(weight, 1e-9) for loss in losses)
        seconds = time.monotonic() - self._started
        line = {
            "step": step,
            "loss": round(main, 4),
            "drafts": [round(draft, 4) for draft in drafts],
            "tokens": self.tokens,
            "seconds": round(seconds, 1),
            "waited": round(self.waited, 1),
        }
        self._log(f"{json.dumps(line)} {self.tokens / seconds:.0f} tokens/s")
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if not math.isfinite(main):
            raise TrainingError(f"the loss is {main} at step {step}")
