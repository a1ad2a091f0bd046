"""Random blocks of GGUF's quantized types: any bytes are a valid block."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

TYPES = tuple(kind for kind in gguf.quants._type_traits if kind != Kind.BF16)
"""All quantized types that the gguf package decodes."""

_HALVES = {
    Kind.Q4_1: (0, 2),
    Kind.Q5_1: (0, 2),
    Kind.Q2_K: (80, 82),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q3_K: (108,),
    Kind.Q6_K: (208,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
}
"""Where the float16 factors of a block lie, if not at its start only."""


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0, size: float = 0.001) -> np.ndarray:
    """uint8 [rows, bytes], with factors of about `size` of both signs, so that values are finite."""
    block, count = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // block, count), dtype=np.uint8)
    factors = (rng.uniform(0.5, 2.0, raw.shape[:2]) * rng.choice([-size, size], raw.shape[:2])).astype(np.float16)
    if kind == Kind.NVFP4:
        raw[..., :4] &= 0x7F
    elif kind == Kind.MXFP4:
        raw[..., 0] = rng.integers(115, 122, raw.shape[:2])
    elif kind == Kind.IQ1_M:  # four bits of it on top of each of four words
        for word in range(4):
            nibble = (factors.view(np.uint16) >> (4 * word) & 15).astype(np.uint8)
            raw[..., 49 + 2 * word] = (raw[..., 49 + 2 * word] & 15) | nibble << 4
    else:
        for at in _HALVES.get(kind, (0,)):
            raw[..., at : at + 2] = factors[..., None].view(np.uint8)
    return raw.reshape(rows, -1)
