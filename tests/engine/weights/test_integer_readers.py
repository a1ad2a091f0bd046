"""AWQ, GPTQ and AutoRound: integers of transposed matrices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.linear.grouped.form import Grouped
from kernels.linear.quantized import Quantized
from services.engine.model.config import ModelError
from services.engine.weights.readers import open_folder
from tests.engine.weights.foreign import LINEAR, Encode, Encoded, assert_serves, check, tiny, write

FORMATS = ("_proj.", "in_proj_qkv", "in_proj_z")


def integers(
    weight: Tensor, bits: int, group: int, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes [K, N], zero points [G, N], scales [G, N] (float16), values [N, K]; `order`: the group of each column."""
    columns = weight.shape[1]
    order = torch.arange(columns) // group if order is None else order
    groups = int(order.max()) + 1
    masked = [weight[:, order == n] for n in range(groups)]
    low = torch.stack([part.amin(1) for part in masked]).clamp(max=0)
    high = torch.stack([part.amax(1) for part in masked]).clamp(min=0)
    top = 2**bits - 1
    if symmetric:
        scales = (2 * torch.maximum(-low, high) / top).half()
        zeros = torch.full_like(low, 2 ** (bits - 1))
    else:
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().clamp(0, top)
    wide_scales, wide_zeros = scales.float()[order], zeros[order]
    codes = (weight.t() / wide_scales + wide_zeros).round().clamp(0, top)
    values = ((codes - wide_zeros) * wide_scales).t()
    return codes.to(torch.int64), zeros.to(torch.int64), scales, values


def words(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 [R, C * bits / 32]: the code at `places[j]` of each word's run goes to bits j * bits and following."""
    per_word = 32 // bits
    runs = codes.unflatten(-1, (-1, per_word))[..., list(places or range(per_word))]
    packed = (runs << torch.arange(per_word) * bits).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def awq(weight: Tensor, group: int, symmetric: bool = False) -> Encoded:
    codes, zeros, scales, values = integers(weight, 4, group, symmetric)
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(codes, 4, places), "qzeros": words(zeros, 4, places), "scales": scales}, values


def gptq(
    weight: Tensor, bits: int, group: int, symmetric: bool, less_one: bool = True, order: Tensor | None = None
) -> Encoded:
    codes, zeros, scales, values = integers(weight, bits, group, symmetric, order)
    packed = words(zeros, bits)
    if less_one:  # from whole words, as GPTQModel does it
        packed = packed - sum(1 << place for place in range(0, 32, bits))
    index = torch.arange(weight.shape[1]) // group if order is None else order
    parts = {"qweight": words(codes.t(), bits).t(), "qzeros": packed, "scales": scales, "g_idx": index.to(torch.int32)}
    return parts, values


def linears(encode: Any) -> Encode:
    return lambda name, weight: encode(weight) if LINEAR.fullmatch(name) else None


def gptq_config(bits: int, group: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **changes}


def test_order_of_awq_in_a_word(tmp_path: Path) -> None:
    """One word by hand: 0x75316420 holds the outputs 0 to 7 in their order."""
    name = "model.layers.1.mlp.up_proj.weight"

    def encode(own: str, weight: Tensor) -> Encoded | None:
        if own != name:
            return None
        parts, values = awq(weight, 64)
        parts["qweight"] = torch.full_like(parts["qweight"], 0x75316420)
        return parts, values

    write(tmp_path, "dense", encode, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"})
    ours = open_folder(tmp_path).encoded(name, 3, 640)
    assert ours.codes[:8, 0].tolist() == [3, 4, 5, 6, 7, 0, 1, 2]


@pytest.mark.parametrize(
    ("group", "symmetric", "expected"),
    [(128, False, "grouped"), (128, True, "int4-g64"), (64, True, "int4-g64"), (32, False, "grouped")],
)
def test_awq(tmp_path: Path, group: int, symmetric: bool, expected: str) -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    quantization["modules_to_not_convert"] = ["lm_head", "in_proj_a", "in_proj_b"]
    written = write(tmp_path, "dense", linears(lambda w: awq(w, group, symmetric)), quantization)
    source = check(tmp_path, written, dict.fromkeys(FORMATS, expected))
    ours = source.encoded("model.layers.0.mlp.down_proj.weight", 0, 256)
    assert isinstance(ours, Quantized if symmetric else Grouped)
    if group == 128:
        assert_serves(tmp_path, "dense", written)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "version", "expected"),
    [
        (4, 128, True, "gptq", "int4-g64"),
        (4, 128, False, "gptq", "grouped"),
        (4, 64, False, "gptq_v2", "grouped"),
        (4, 64, True, "gptq_v2", "int4-g64"),
        (8, 32, True, None, "int8-g32"),
        (8, 128, False, "gptq", "grouped"),
        (2, 64, True, "gptq", "grouped"),
        (4, -1, True, "gptq", "int4-g64"),
    ],
)
def test_gptq(tmp_path: Path, bits: int, group: int, symmetric: bool, version: str | None, expected: str) -> None:
    quantization = gptq_config(bits, group, checkpoint_format=version, sym=symmetric)
    size = group if group > 0 else 10**6

    def encode(weight: Tensor) -> Encoded:
        return gptq(weight, bits, size, symmetric, version != "gptq_v2")

    written = write(tmp_path, "dense", linears(encode), quantization)
    check(tmp_path, written, dict.fromkeys(FORMATS, expected))
    weight = tiny("dense").state_dict()["model.layers.0.mlp.up_proj.weight"]
    lost = (written["model.layers.0.mlp.up_proj.weight"] - weight).norm() / weight.norm()
    assert lost < {2: 0.9, 4: 0.2, 8: 0.01}[bits]


def test_gptq_zero_points_of_0(tmp_path: Path) -> None:
    """Where 1 was subtracted from a word, a 0 has borrowed from its neighbour."""

    def encode(weight: Tensor) -> Encoded:
        positive = torch.arange(len(weight)) % 3 == 0
        parts, values = gptq(torch.where(positive[:, None], weight.abs(), weight), 4, 128, False)
        assert bool((values[positive] >= 0).all())
        return parts, values

    written = write(tmp_path, "dense", linears(encode), gptq_config(4, 128, sym=False))
    check(tmp_path, written, dict.fromkeys(FORMATS, "grouped"))


def test_gptq_with_columns_out_of_order(tmp_path: Path) -> None:
    """desc_act: groups of columns that do not lie together can only be decoded."""

    def encode(weight: Tensor) -> Encoded:
        order = torch.arange(weight.shape[1]) // 128
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(1))]
        return gptq(weight, 4, 128, True, order=order)

    written = write(tmp_path, "dense", linears(encode), gptq_config(4, 128, desc_act=True))
    source = check(tmp_path, written, dict.fromkeys(FORMATS, "float16"))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj\.scales .* do not lie together: only decoded"):
        source.encoded("model.layers.0.mlp.up_proj.weight", 0, 8)
    assert_serves(tmp_path, "dense", written)


def test_gptq_with_settings_of_some_modules(tmp_path: Path) -> None:
    """`dynamic`: 8 bits in some modules, others left out; no g_idx."""

    def encode(name: str, weight: Tensor) -> Encoded | None:
        if "k_proj" in name or not LINEAR.fullmatch(name):
            return None
        parts, values = gptq(weight, *((8, 64) if "down_proj" in name else (4, 128)), True)
        return {role: part for role, part in parts.items() if role != "g_idx"}, values

    dynamic = {r"+:.*down_proj": {"bits": 8, "group_size": 64}, r"-:.*k_proj": {}}
    written = write(tmp_path, "dense", encode, gptq_config(4, 128, dynamic=dynamic))
    formats = {"down_proj": "int8-g32", "k_proj": "float32", **dict.fromkeys(FORMATS, "int4-g64")}
    check(tmp_path, written, formats)


@pytest.mark.parametrize(
    "packing", ["auto_round:auto_gptq", "auto_round:auto_awq", "auto_round", "auto_round:gptqmodel"]
)
def test_auto_round(tmp_path: Path, packing: str) -> None:
    def encode(weight: Tensor) -> Encoded:
        if packing.endswith("awq"):
            return awq(weight, 128)
        return gptq(weight, 4, 128, False, less_one=packing.endswith("auto_gptq"))

    quantization = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": False, "packing_format": packing}
    written = write(tmp_path, "dense", linears(encode), quantization)
    check(tmp_path, written, dict.fromkeys(FORMATS, "grouped"))
