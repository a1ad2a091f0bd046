"""Names a model for the cache: engines with equal fingerprints share KV blocks.

Covered: the weights, all that the decoder reads from the model's config, the dtype that it runs in, and the layout of
a page (with the KV format and its version) and of a recurrent state (with its dtype). Of weight files up to 1 GiB in
all, every byte counts; of larger ones all headers (names, shapes, types) and three samples of 64 KiB of each tensor,
which any training step or other quantization changes; so the same model in two formats is two models. Not covered:
names and places of files, the device and whether quantized weights stay packed (all agree up to rounding), and the
tokenizer of a safetensors folder, since KV depends on token ids alone. The same weights in other files (GGUF or
safetensors, other shards) count as another model.
"""

import hashlib
from collections.abc import Iterator, Sequence

import torch

from services.engine.cache.pages import KvLayout
from services.engine.cache.states import StateLayout
from services.engine.config import KvFormat, StateDtype
from services.engine.model.hybrid_config import HybridConfig
from services.engine.weights.checkpoint import Checkpoint, WeightFile

_WHOLE_UP_TO = 2**30
_SAMPLE = 2**16


def fingerprint(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    kv_format: KvFormat = "auto",
    state_dtype: StateDtype = "float32",
    whole_up_to: int = _WHOLE_UP_TO,
) -> str:
    """32 hex digits, the same on every machine."""
    digest = hashlib.blake2b(digest_size=16, person=b"samovar-model")
    layout = KvLayout.of(checkpoint.config, dtype, kv_format)
    parts = [repr(checkpoint.config), layout.describe()]
    if isinstance(checkpoint.config, HybridConfig):
        parts.append(StateLayout.of(checkpoint.config, dtype, state_dtype).describe())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    for data in _content(checkpoint.files(), whole_up_to):
        digest.update(data)
    return digest.hexdigest()


def _content(files: Sequence[WeightFile], whole_up_to: int) -> Iterator[memoryview]:
    if sum(len(file.data) for file in files) <= whole_up_to:
        for file in files:
            yield file.data
        return
    for file in files:
        yield file.data[: file.header_bytes]
        for start, size in file.tensors:
            for first in (start, start + max(0, size - _SAMPLE) // 2, start + max(0, size - _SAMPLE)):
                yield file.data[first : min(first + _SAMPLE, start + size)]


def content_hash(checkpoint: Checkpoint) -> str:
    """Of the files alone, 32 hex digits; large ones are sampled as above."""
    digest = hashlib.blake2b(digest_size=16, person=b"samovar-files")
    for data in _content(checkpoint.files(), _WHOLE_UP_TO):
        digest.update(data)
    return digest.hexdigest()
