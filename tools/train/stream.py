"""The data of a training, step by step: the same for a seed and a data folder, with any number of workers."""

import multiprocessing
import os
import queue
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

from tools.train.data.dataset import Dataset
from tools.train.schedule import MIX_LONG, Plan, phase_at
from tools.train.tasks.rows import MicroBatch, micro_batch
from tools.train.tasks.source import Source

StepBatches = list[MicroBatch]
"""The micro-batches of one optimizer step."""
PATIENCE = 5.0
"""Seconds without data after which a worker is looked at."""
QUEUED_STEPS = 2
"""That each worker keeps ready."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    data: Path
    """A folder that `prepare` wrote."""
    plan: Plan
    steps: int
    tokens: int
    """Of one micro-batch: a multiple of all row lengths."""
    seed: int


def step_batches(source: Source, options: StreamOptions, step: int) -> StepBatches:
    """`source` gives the dataset only; the draws depend on the options' seed and the step."""
    fresh = source.reseeded(f"{options.seed}/{step}")
    phase = phase_at(options.plan, step, options.steps)
    batches = [micro_batch(fresh, options.tokens, fresh.rng.choice(phase.short), phase.mix)]
    if phase.long:
        batches.append(micro_batch(fresh, options.tokens, fresh.rng.choice(phase.long), MIX_LONG))
    return batches


def work(options: StreamOptions, first: int, stride: int, out: "Queue[StepBatches]") -> None:
    """A worker process: the steps first, first + stride, ..."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = Source(Dataset(options.data, "train"), "")
    for step in range(first, options.steps, stride):
        out.put(step_batches(source, options, step))


@contextmanager
def open_stream(options: StreamOptions, workers: int) -> Generator[Iterator[StepBatches], None, None]:
    """An iterator over all steps. Step i comes from worker i % workers; with 0 workers from this process. The processes
    end with the context. Raises RuntimeError from the iterator if a worker died."""
    if workers == 0:
        source = Source(Dataset(options.data, "train"), "")
        yield (step_batches(source, options, step) for step in range(options.steps))
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit CUDA
    queues: list[Queue[StepBatches]] = [context.Queue(QUEUED_STEPS) for _ in range(workers)]
    processes = [
        context.Process(target=work, args=(options, index, workers, queues[index]), daemon=True)
        for index in range(workers)
    ]
    for process in processes:
        process.start()

    def steps() -> Iterator[StepBatches]:
        for step in range(options.steps):
            index = step % workers
            while True:
                try:
                    yield queues[index].get(timeout=PATIENCE)
                    break
                except queue.Empty:
                    if not processes[index].is_alive() and queues[index].empty():
                        raise RuntimeError(
                            f"data worker {index} died with exit code {processes[index].exitcode}"
                        ) from None

    try:
        yield steps()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        for each in queues:
            each.close()
            each.cancel_join_thread()
