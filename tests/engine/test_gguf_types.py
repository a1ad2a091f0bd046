"""Every quantized type of GGUF: codes and scales that we take from its blocks, against the gguf package's values."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from kernels.linear import quantized
from kernels.linear.grouped import form
from kernels.linear.grouped.form import Grouped
from kernels.linear.grouped.weight import pack
from kernels.linear.quantized import Quantized
from services.engine.model.config import ModelError
from services.engine.weights import gguf_blocks, gguf_grids
from services.engine.weights.gguf_checkpoint import GgufCheckpoint
from services.engine.weights.gguf_order import Tiled, movable, move_columns
from tests.engine import gguf_files
from tests.engine.gguf_blocks import TYPES, random_blocks
from tests.engine.tiny_models import oracle

DECODERS = {**gguf_blocks.DECODERS, **gguf_grids.DECODERS}


def dequantize(natural: Quantized | Grouped) -> Tensor:
    return form.dequantize(natural) if isinstance(natural, Grouped) else quantized.dequantize(natural)


def natural(kind: Kind, raw: np.ndarray) -> Quantized | Grouped:
    return DECODERS[kind](torch.from_numpy(raw).unflatten(-1, (-1, gguf.GGML_QUANT_SIZES[kind][1])))


def test_all_types_are_known() -> None:
    assert set(TYPES) == DECODERS.keys()
    assert len(TYPES) == 23


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_values_are_those_of_the_package(kind: Kind) -> None:
    """Bit for bit, for factors of any size, infinities and NaNs too."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 256, (5, 3 * size), dtype=np.uint8)
    if kind == Kind.NVFP4:
        raw.reshape(5, 3, size)[..., :4] &= 0x7F  # scales have no sign
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(dequantize(natural(kind, raw)).numpy(), expected)


BITS = {
    Kind.Q4_0: 4.5, Kind.Q4_1: 5, Kind.Q5_0: 5.5, Kind.Q5_1: 6, Kind.Q2_K: 3.125, Kind.Q3_K: 3.5625, Kind.Q4_K: 4.625,
    Kind.Q5_K: 5.625, Kind.Q6_K: 6.5625, Kind.IQ4_NL: 4.5, Kind.IQ4_XS: 4.3125, Kind.MXFP4: 4.5, Kind.TQ1_0: 2.0625,
    Kind.TQ2_0: 2.0625, Kind.IQ1_S: 2.6875, Kind.IQ1_M: 3.625, Kind.IQ2_XXS: 3.375, Kind.IQ2_XS: 3.625,
    Kind.IQ2_S: 3.625, Kind.IQ3_XXS: 4.375, Kind.IQ3_S: 4.3125,
}  # fmt: skip


@pytest.mark.parametrize("kind", BITS, ids=lambda kind: kind.name)
def test_bits_a_weight(kind: Kind) -> None:
    """What the table in the docstrings says."""
    weight = natural(kind, random_blocks(kind, 4, 512))
    assert isinstance(weight, Grouped)
    assert pack(weight).nbytes * 8 / weight.codes.numel() == BITS[kind]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("width", [64, 128])
def test_columns_of_heads_change_places(kind: Kind, width: int) -> None:
    """Also where two or four heads share a block of 256, whose scale then goes to each."""
    columns = 6 * width * 2
    raw = random_blocks(kind, 3, columns)
    order = Tiled(key_heads=4, ratio=3, width=width)
    places = np.arange(columns).reshape(4, 3, width).swapaxes(0, 1).reshape(-1)
    expected = np.empty((3, columns), dtype=np.float32)
    expected[:, places] = gguf.quants.dequantize(raw, kind)
    weight = natural(kind, raw)
    group = weight.layout.group if isinstance(weight, Grouped) else 32
    assert movable(group, order, isinstance(weight, Grouped))
    np.testing.assert_array_equal(dequantize(move_columns(weight, order)).numpy(), expected)


def test_columns_that_cannot_move() -> None:
    assert not movable(32, Tiled(2, 2, width=8), divisible=True)
    assert not movable(32, Tiled(2, 2, width=48), divisible=False)
    assert movable(32, Tiled(2, 2, width=48), divisible=True)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_codes_and_values_of_a_file_agree(tmp_path: Path, kind: Kind) -> None:
    """Pieces of rows, in the order of our kernels where the converter has moved them."""
    model = oracle(
        "llama", hidden_size=256, intermediate_size=256, num_attention_heads=8, head_dim=32, num_hidden_layers=1
    )
    blocks = {name: random_blocks(kind, 256, 256, seed) for seed, name in enumerate(("q", "gate"))}
    raw = {"blk.0.attn_q.weight": (blocks["q"], kind), "blk.0.ffn_gate.weight": (blocks["gate"], kind)}
    checkpoint = GgufCheckpoint(gguf_files.write(tmp_path / "m.gguf", model, raw=raw))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
        target = torch.full((256, 256), torch.nan)
        checkpoint.read(name, target)
        assert checkpoint.format(name) == {Kind.Q8_0: "int8-g32", Kind.NVFP4: "nvfp4"}.get(kind, "grouped")
        pieces = [checkpoint.encoded(name, first, min(256, first + 60)) for first in range(0, 256, 60)]
        torch.testing.assert_close(torch.cat([dequantize(piece) for piece in pieces]), target, rtol=0, atol=0)
    expected = gguf_files.deinterleave(gguf.quants.dequantize(blocks["q"], kind), 8)
    checkpoint.read("model.layers.0.self_attn.q_proj.weight", target)
    np.testing.assert_array_equal(target.numpy(), expected)


def test_dense_tensors_have_no_codes(tmp_path: Path) -> None:
    kinds = {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bf16"}
    for kind, expected in kinds.items():
        checkpoint = GgufCheckpoint(gguf_files.write(tmp_path / f"{kind.name}.gguf", oracle("llama"), kind))
        assert checkpoint.format("model.layers.0.mlp.up_proj.weight") == expected
        assert checkpoint.format("model.norm.weight") == "float32"
        with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight has no codes"):
            checkpoint.encoded("model.layers.0.mlp.up_proj.weight", 0, 1)


def test_scale_beside_an_nvfp4_tensor(tmp_path: Path) -> None:
    model = oracle("llama", hidden_size=64, num_attention_heads=8, num_hidden_layers=1)
    raw = random_blocks(Kind.NVFP4, 80, 64)
    checkpoint = GgufCheckpoint(
        gguf_files.write(
            tmp_path / "m.gguf",
            model,
            raw={"blk.0.ffn_up.weight": (raw, Kind.NVFP4)},
            replaced={
                "blk.0.ffn_up.scale": np.array([0.375], np.float32),
                "blk.0.ffn_up.input_scale": np.array([7.0], np.float32),
            },
        )
    )
    name = "model.layers.0.mlp.up_proj.weight"
    assert not [other for other in checkpoint.names() if "scale" in other]
    expected = gguf.quants.dequantize(raw, Kind.NVFP4) * np.float32(0.375)
    target = torch.full((80, 64), torch.nan)
    checkpoint.read(name, target)
    np.testing.assert_array_equal(target.numpy(), expected)
    np.testing.assert_array_equal(dequantize(checkpoint.encoded(name, 0, 80)).numpy(), expected)


def test_vector_in_blocks(tmp_path: Path) -> None:
    raw = {"output_norm.weight": (random_blocks(Kind.Q8_0, 1, 64)[0], Kind.Q8_0)}
    model = oracle("llama", hidden_size=64, num_attention_heads=8, num_hidden_layers=1)
    checkpoint = GgufCheckpoint(gguf_files.write(tmp_path / "m.gguf", model, raw=raw))
    assert checkpoint.format("model.norm.weight") == "float32"
    with pytest.raises(ModelError, match=r"output_norm\.weight of shape \[64\] has the type Q8_0"):
        checkpoint.read("model.norm.weight", torch.empty(64))
