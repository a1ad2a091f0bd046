"""Quantized weights of other tools, in folders of safetensors files: see `open_folder`.

    method of the config      layouts                                                      encoded as
    fp8                       block FP8 of the official releases, one scale a tensor       fp8-block, fp8
    compressed-tensors        nvfp4-pack-quantized; float-, int- and naive-quantized;      nvfp4, fp8, fp8-block,
                              pack-quantized of 1 to 8 bits; mixed                         intB-gG, grouped
    modelopt                  NVFP4, FP8 (a tensor, a row, a block); mixed                 nvfp4, fp8, fp8-block
    awq, gptq, auto-round     4 bits (gemm); 2, 4 and 8 bits, both versions                intB-gG, grouped

Integers become one of our formats where that holds each code and scale: symmetric ones whose groups are of a multiple
of the format's, and which have 16-bit scales. Others are grouped. Only decoded: GPTQ with desc_act, whose groups are of
columns that do not lie together, FP8 blocks that are no multiple of 128 x 128, and odd sizes of integer groups.
"""

from pathlib import Path

from services.engine.weights.readers.declaration import read_declaration, without_quantization
from services.engine.weights.readers.quantized_checkpoint import QuantizedCheckpoint
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from services.engine.weights.source import QuantizedSource
from services.engine.weights.tokenizer import read_json


def open_folder(path: Path) -> QuantizedSource:
    """A model in a folder of `transformers`, quantized or not. Raises ModelError naming what cannot be used."""
    config = read_json(path / "config.json")
    declaration = read_declaration(path, config)
    if declaration is None:
        return SafetensorsCheckpoint(path)
    return QuantizedCheckpoint(SafetensorsCheckpoint(path, without_quantization(config)), declaration)
