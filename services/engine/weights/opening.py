"""From the place of a model to its reader."""

import torch

from services.engine.weights.artifact.reader import ArtifactCheckpoint
from services.engine.weights.gguf_checkpoint import GgufCheckpoint
from services.engine.weights.readers import open_folder
from services.engine.weights.resolve import Located
from services.engine.weights.source import QuantizedSource


def open_model(located: Located, device: torch.device | None = None) -> QuantizedSource:
    """`device`: where the codes of a model of ours should lie when they are asked for. Raises ModelError."""
    if located.kind == "gguf":
        return GgufCheckpoint(located.path)
    if located.kind == "artifact":
        return ArtifactCheckpoint(located.path, device)
    return open_folder(located.path)
