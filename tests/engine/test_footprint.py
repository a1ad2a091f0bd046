"""What weights are planned to take, against what they take when they are loaded."""

from pathlib import Path

import pytest
import torch

from kernels.linear.quantized import FORMATS
from services.engine.config import EngineConfig
from services.engine.model.matrix import Matrix, MatrixSlot, Place
from services.engine.weights import recipes
from services.engine.weights.artifact.reader import ArtifactCheckpoint
from services.engine.weights.artifact.writer import Job
from services.engine.weights.fingerprint import content_hash
from services.engine.weights.footprint import Footprint, footprint
from services.engine.weights.loader import load_checkpoint
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from services.engine.weights.source import GROUPED, QuantizedSource
from tests.engine.packed_source import EncodedSource
from tests.engine.test_hybrid_checkpoint import change, mtp_tensors, save_hybrid
from tests.engine.test_packed_model import everywhere, mixture
from tests.engine.test_safetensors import edit
from tests.engine.tiny_prompts import MODEL

CPU = torch.device("cpu")


def config(packed: bool) -> EngineConfig:
    return EngineConfig(device="cpu", dtype="float32", weights="packed" if packed else "dense")


def loaded(source: QuantizedSource, packed: bool) -> Footprint:
    """Counted in the loaded model; the tile is not to be seen there."""
    model = load_checkpoint(source, "model", config(packed), lambda share, what: None)
    return Footprint(held(list(model.model.slots())), held(list(model.mtp.slots())) if model.mtp else 0, 0)


def held(places: list[Place]) -> int:
    matrices: set[Matrix] = {place.matrix for place in places if isinstance(place, MatrixSlot)}
    vectors = sum(place.target.nbytes for place in places if not isinstance(place, MatrixSlot))
    return vectors + sum(block.nbytes for matrix in matrices for block in matrix.blocks)


def assert_planned(source: QuantizedSource, packed: bool) -> None:
    planned, taken = footprint(source, torch.float32, packed), loaded(source, packed)
    assert (planned.decoder, planned.draft) == (taken.decoder, taken.draft)


@pytest.mark.parametrize("format", [*FORMATS, GROUPED])
def test_every_format(tmp_path: Path, format: str) -> None:
    """Columns that fill no group, rows that fill no block; a tied head."""
    save_hybrid(tmp_path, "dense-odd")
    assert_planned(EncodedSource(SafetensorsCheckpoint(tmp_path), everywhere(format)), packed=True)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_several_formats(tmp_path: Path, shape: str, packed: bool) -> None:
    """Beside each other in one matrix, in a mixture that must be whole, and in the head for drafts."""
    model = save_hybrid(tmp_path, shape)
    if shape == "dense":
        edit(tmp_path / "config.json", mtp_num_hidden_layers=1)
        change(tmp_path, lambda tensors: {**tensors, **mtp_tensors(model)})
    assert_planned(EncodedSource(SafetensorsCheckpoint(tmp_path), mixture), packed)


@pytest.mark.parametrize("recipe", ["nvfp4-mixed", "gsq3"])
def test_recipes(tmp_path: Path, recipe: str) -> None:
    """Known before the model is packed; the trained small model with its draft head."""
    source = SafetensorsCheckpoint(MODEL)
    planned = footprint(source, torch.float32, True, recipes.load(recipe))
    job = Job(source, "model", content_hash(source), recipes.load(recipe), recipe, tmp_path / "out", CPU)
    job.run(lambda share, what: None)
    taken = loaded(ArtifactCheckpoint(tmp_path / "out"), packed=True)
    assert (planned.decoder, planned.draft) == (taken.decoder, taken.draft)
    assert planned.draft > 0
    assert planned.tile == 4096 * 256 * 4  # the embedding
