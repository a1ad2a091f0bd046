"""Packing a source as the tests want it; without transformers, for child processes."""

from pathlib import Path

import torch

from services.engine.weights import recipes
from services.engine.weights.artifact.manifest import Manifest
from services.engine.weights.artifact.writer import Job
from services.engine.weights.fingerprint import content_hash
from services.engine.weights.recipes import Recipe
from services.engine.weights.source import QuantizedSource

CPU = torch.device("cpu")


def everything(format: str) -> Recipe:
    return recipes.parse(f'description = ""\nrules = [{{tensors = ["*"], format = "{format}"}}]', format)


def job(source: QuantizedSource, out: Path, recipe: Recipe | None = None, shard_bytes: int = 2**32) -> Job:
    return Job(source, "test", content_hash(source), recipe or everything("keep"), "r", out, CPU, shard_bytes)


def pack(source: QuantizedSource, out: Path, recipe: Recipe | None = None, shard_bytes: int = 2**32) -> Manifest:
    return job(source, out, recipe, shard_bytes).run(lambda share, what: None)
