"""compressed-tensors: written by the package of that name, which is also the oracle of the values."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor

from kernels.linear.grouped.form import Grouped
from kernels.linear.quantized import Quantized
from services.engine.weights.readers import open_folder
from services.engine.weights.readers.bits import unpack, unpack_down
from services.engine.weights.readers.compressed_tensors_config import read_compressed_tensors
from services.engine.weights.readers.scheme import Scheme
from tests.engine.weights.foreign import LINEAR, Encode, Encoded, assert_serves, change, check, tiny, write

E4M3 = torch.float8_e4m3fn


def args(bits: int, kind: str = "int", **settings: Any) -> QuantizationArgs:
    if "group_size" in settings:
        settings.setdefault("strategy", "group")
    return QuantizationArgs(num_bits=bits, type=kind, **{"strategy": "channel", **settings})


def nvfp4() -> QuantizationArgs:
    return args(4, "float", group_size=16, strategy="tensor_group", scale_dtype=E4M3)


def config(groups: dict[str, tuple[str, list[str], QuantizationArgs]], ignore: list[str] | None = None) -> Any:
    """As the package writes it. `groups`: format, targets, weights of each."""
    schemes = {
        name: QuantizationScheme(targets=targets, weights=weights, format=form)
        for name, (form, targets, weights) in groups.items()
    }
    form = next(iter(groups.values()))[0] if len(groups) == 1 else "mixed-precision"
    written = QuantizationConfig(
        config_groups=schemes, format=form, ignore=ignore or [], quantization_status="compressed"
    )
    return written.model_dump(mode="json")


def encoded(form: str, weights: QuantizationArgs, weight: Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> Encoded:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(form)
    parts = {"weight": weight, **_scales(weights, weight, scale_dtype)}
    stored = compressor.compress(parts, scheme)
    if form == "nvfp4-pack-quantized":  # the package decodes it in bfloat16
        codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
        scales = stored["weight_scale"].float().repeat_interleave(16, dim=1)
        return stored, codes * scales / stored["weight_global_scale"]
    # The package rounds to the type of the scales; their values are what counts here.
    wide = {name: part.float() if name == "weight_scale" else part for name, part in stored.items()}
    return stored, compressor.decompress(wide, scheme)["weight"].float()


def _scales(weights: QuantizationArgs, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    rows, columns = weight.shape
    strategy = str(weights.strategy)
    if strategy == "tensor_group":
        whole = 448.0 * 6.0 / weight.abs().amax().reshape(1)
        peaks = weight.abs().unflatten(1, (-1, 16)).amax(-1)
        return {"weight_global_scale": whole, "weight_scale": (peaks / 6.0 * whole).to(E4M3).float()}
    if strategy == "block":
        high, wide = weights.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        peaks = padded.abs().unflatten(0, (-1, high)).unflatten(2, (-1, wide)).amax((1, 3))
        return {"weight_scale": (peaks / 448.0).to(dtype)}
    size = weights.group_size if strategy == "group" else columns
    grouped = weight.reshape(1, -1) if strategy == "tensor" else weight.unflatten(1, (-1, size))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if str(weights.type) == "float":
        scale = (torch.maximum(-low, high) / 448.0).to(dtype)
        return {"weight_scale": scale.reshape(1) if strategy == "tensor" else scale}
    middle = 2 ** (weights.num_bits - 1)
    if weights.symmetric:
        return {"weight_scale": (torch.maximum(-low, high) / max(middle - 0.5, 1)).to(dtype)}
    scale = ((high - low) / (2 * middle - 1)).to(dtype)
    zeros = (-low / scale.float()).round().clamp(0, 2 * middle - 1) - middle
    return {"weight_scale": scale, "weight_zero_point": zeros.to(torch.int8)}


def everywhere(form: str, weights: QuantizationArgs, scale_dtype: torch.dtype = torch.bfloat16) -> Encode:
    return lambda name, weight: encoded(form, weights, weight, scale_dtype) if LINEAR.fullmatch(name) else None


def test_packed_bits() -> None:
    """Vectors that were taken from the package: 3 bits cross the border of words, zero points run down the rows."""

    def words(*texts: str) -> Tensor:
        return torch.tensor([int(text, 16) for text in texts]).to(torch.int32)

    three = words("88fac688", "c688fac6", "fac688fa")
    assert unpack(three[None], 3, 32).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7] * 4]
    four = words("fea98710")
    assert unpack(four[None], 4, 8).tolist() == [[0, 1, 7, 8, 9, 10, 14, 15]]
    assert unpack_down(words("fedcba98")[:, None], 4, 8).tolist() == [[n] for n in range(8, 16)]


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_of_any_count(bits: int) -> None:
    middle = 2 ** (bits - 1)
    generator = torch.Generator().manual_seed(bits)
    for count in (1, 9, 31, 32, 33, 144, 255):
        codes = torch.randint(-middle, middle, (3, count), generator=generator, dtype=torch.int8)
        assert torch.equal(unpack(pack_to_int32(codes, bits), bits, count), (codes + middle).view(torch.uint8))
        down = pack_to_int32(codes.t().contiguous(), bits, packed_dim=0)
        assert torch.equal(unpack_down(down, bits, count), (codes.t() + middle).view(torch.uint8))


@pytest.mark.parametrize(
    ("form", "weights", "expected"),
    [
        ("pack-quantized", args(3, group_size=128), "int3-g128"),
        ("pack-quantized", args(4, group_size=64), "int4-g64"),
        ("pack-quantized", args(4, group_size=128), "int4-g64"),
        ("pack-quantized", args(4), "int4-g64"),
        ("pack-quantized", args(4, group_size=32), "grouped"),
        ("pack-quantized", args(4, group_size=128, symmetric=False), "grouped"),
        ("pack-quantized", args(3, group_size=64, symmetric=False), "grouped"),
        ("pack-quantized", args(2, group_size=64), "grouped"),
        ("pack-quantized", args(5, group_size=128), "int5-g64"),
        ("pack-quantized", args(6), "int6-g64"),
        ("pack-quantized", args(7, group_size=32), "int8-g32"),
        ("pack-quantized", args(8, group_size=128), "int8-g32"),
        ("pack-quantized", args(8, symmetric=False), "grouped"),
        ("int-quantized", args(8), "int8-g32"),
        ("int-quantized", args(8, symmetric=False), "grouped"),
        ("int-quantized", args(8, strategy="tensor"), "int8-g32"),
        ("int-quantized", args(8, strategy="tensor", symmetric=False), "grouped"),
        ("naive-quantized", args(4, group_size=64), "int4-g64"),
        ("float-quantized", args(8, "float"), "fp8"),
        ("float-quantized", args(8, "float", strategy="tensor"), "fp8"),
        ("naive-quantized", args(8, "float", strategy="block", block_structure=[128, 128]), "fp8-block"),
        ("float-quantized", args(8, "float", strategy="block", block_structure=[256, 128]), "fp8-block"),
        ("float-quantized", args(8, "float", strategy="block", block_structure=[64, 128]), "bf16"),
        ("nvfp4-pack-quantized", nvfp4(), "nvfp4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layouts(tmp_path: Path, form: str, weights: QuantizationArgs, expected: str) -> None:
    written = write(tmp_path, "dense", everywhere(form, weights), config({"group_0": (form, ["Linear"], weights)}))
    formats = {"_proj.": expected, "in_proj_qkv": expected, "in_proj_z": expected}
    check(tmp_path, written, formats)
    errors = []
    for name, weight in tiny("dense").state_dict().items():
        if LINEAR.fullmatch(name):
            errors.append(float((written[name] - weight).norm() / weight.norm()))
    # Whatever was lost, was lost in quantizing: an order or a sign gone wrong would cost all of it.
    assert max(errors) < {2: 0.9, 3: 0.4, 4: 0.2}.get(weights.num_bits, 0.1)


@pytest.mark.parametrize(
    ("form", "weights", "expected"),
    [
        ("pack-quantized", args(3, group_size=16), "grouped"),
        ("pack-quantized", args(3), "int3-g128"),
        ("pack-quantized", args(3, symmetric=False), "grouped"),
        ("pack-quantized", args(4, group_size=48), "float16"),
        ("naive-quantized", args(8, "float", strategy="block", block_structure=[128, 128]), "fp8-block"),
        ("naive-quantized", args(8, "float", strategy="block", block_structure=[256, 256]), "fp8-block"),
        ("nvfp4-pack-quantized", nvfp4(), "nvfp4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_odd_shapes(tmp_path: Path, form: str, weights: QuantizationArgs, expected: str) -> None:
    """144 columns: words and blocks that are not full. (In MLPs only: others are a multiple of 16 at most.)"""

    def encode(name: str, weight: Tensor) -> Encoded | None:
        return encoded(form, weights, weight, torch.float16) if ".mlp." in name else None

    written = write(tmp_path, "odd", encode, config({"group_0": (form, ["re:.*mlp.*"], weights)}))
    check(tmp_path, written, {".mlp.": expected})
    assert_serves(tmp_path, "odd", written)


def test_scales_without_a_second_dim(tmp_path: Path) -> None:
    weights = args(8)
    written = write(
        tmp_path, "dense", everywhere("int-quantized", weights), config({"g": ("int-quantized", ["Linear"], weights)})
    )
    name = "model.layers.0.mlp.up_proj.weight_scale"
    change(tmp_path, name, load_file(tmp_path / "model.safetensors")[name].flatten())
    check(tmp_path, written, dict.fromkeys(("_proj.", "in_proj_qkv", "in_proj_z"), "int8-g32"))


def test_wide_scales(tmp_path: Path) -> None:
    """Our integer formats have 16 bits a scale; 32 stay 32."""
    weights = args(4, group_size=128)
    encode = everywhere("pack-quantized", weights, torch.float32)
    written = write(tmp_path, "dense", encode, config({"group_0": ("pack-quantized", ["Linear"], weights)}))
    source = check(tmp_path, written, {"_proj.": "grouped", "in_proj_qkv": "grouped", "in_proj_z": "grouped"})
    ours = source.encoded("model.layers.0.mlp.up_proj.weight", 0, 640)
    assert isinstance(ours, Grouped)
    assert (ours.scales.dtype, ours.mins) == (torch.float32, None)


def test_codes_and_scales_stay(tmp_path: Path) -> None:
    """Bit for bit, in our forms."""
    weights = args(4, group_size=128)
    stored: dict[str, dict[str, Tensor]] = {}

    def encode(name: str, weight: Tensor) -> Encoded | None:
        if not LINEAR.fullmatch(name):
            return None
        parts, values = encoded(
            *(("pack-quantized", weights) if "mlp" in name else ("nvfp4-pack-quantized", nvfp4())), weight
        )
        stored[name] = parts
        return parts, values

    groups = {
        "group_0": ("pack-quantized", ["re:.*mlp.*"], weights),
        "group_1": ("nvfp4-pack-quantized", ["Linear"], nvfp4()),
    }
    write(tmp_path, "dense", encode, config(groups))
    source = open_folder(tmp_path)
    for name, parts in stored.items():
        ours = source.encoded(name, 0, source.shape(name)[0])
        assert isinstance(ours, Quantized)
        assert ours.scales is not None
        if "mlp" in name:
            assert torch.equal(ours.codes + 8, unpack(parts["weight_packed"], 4, ours.columns).to(torch.int8))
            assert torch.equal(ours.scales, parts["weight_scale"].repeat_interleave(2, dim=1))
        else:
            assert torch.equal(ours.codes[:, 0::2] | ours.codes[:, 1::2] << 4, parts["weight_packed"])
            assert torch.equal(ours.scales.view(torch.uint8), parts["weight_scale"].view(torch.uint8))
            assert ours.row_scale is not None
            assert bool((ours.row_scale == 1 / parts["weight_global_scale"]).all())


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_mixed_with_overlapping_targets(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """As unsloth's and Red Hat's: NVFP4 in early MLPs, FP8 rows in the rest and in the head, 4 bits in the embedding;
    a plain layer, scales of activations and of the KV cache."""
    row8, embedding = args(8, "float"), args(4, group_size=64)

    def encode(name: str, weight: Tensor) -> Encoded | None:
        if "layers.0.mlp" in name:
            parts, values = encoded("nvfp4-pack-quantized", nvfp4(), weight)
            return {**parts, "input_global_scale": torch.ones(1)}, values
        if "embed_tokens" in name:
            return encoded("pack-quantized", embedding, weight)
        if "layers.1.mlp.down_proj" in name or not (LINEAR.fullmatch(name) or name.startswith("lm_head")):
            return None
        parts, values = encoded("float-quantized", row8, weight)
        if name.endswith("k_proj.weight"):
            parts |= {"k_scale": torch.ones(1, dtype=torch.bfloat16), "v_scale": torch.ones(1, dtype=torch.bfloat16)}
        return {**parts, "input_scale": torch.ones(1)}, values

    groups = {
        "group_0": ("float-quantized", ["re:.*self_attn.*", "re:.*mlp.*", "re:.*linear_attn.*", "lm_head"], row8),
        "group_1": ("nvfp4-pack-quantized", [r"re:.*layers\.0\.mlp.*"], nvfp4()),
        "group_2": ("pack-quantized", ["Embedding"], embedding),
    }
    ignored = ["re:.*in_proj_[ab]", f"{prefix}layers.1.mlp.down_proj", "re:.*visual.*"]
    with caplog.at_level(logging.INFO):
        written = write(tmp_path, "dense", encode, config(groups, ignored), prefix)
        formats = {
            "layers.0.mlp": "nvfp4",
            "down_proj": "float32",
            "embed_tokens": "int4-g64",
            "lm_head": "fp8",
            "_proj.": "fp8",
            "in_proj_qkv": "fp8",
            "in_proj_z": "fp8",
        }
        check(tmp_path, written, formats)
    messages = [record.message for record in caplog.records]
    assert f"{tmp_path}: 15 scales of activations or of a quantized KV cache are not used" in messages
    assert not any("leaves them out" in message for message in messages)
    assert_serves(tmp_path, "dense", written)


def test_experts_one_by_one(tmp_path: Path) -> None:
    weights = args(4, group_size=64)
    groups = {"group_0": ("pack-quantized", ["Linear"], weights)}
    written = write(tmp_path, "moe", everywhere("pack-quantized", weights), config(groups), one_by_one=True)
    formats = {
        "shared_expert_gate": "float32",
        "_proj.": "int4-g64",
        "in_proj_qkv": "int4-g64",
        "in_proj_z": "int4-g64",
    }
    check(tmp_path, written, formats)
    assert_serves(tmp_path, "moe", written)


def test_experts_in_a_stack(tmp_path: Path) -> None:
    """Not seen in the wild yet: each layout for single matrices works for a stack of them."""
    stacked = {"gate_up_proj": args(3, group_size=64), "down_proj": args(8, "float")}

    def encode(name: str, weight: Tensor) -> Encoded | None:
        if weight.dim() != 3 or "experts" not in name:
            return None
        form = "pack-quantized" if name.endswith("gate_up_proj") else "float-quantized"
        parts = [encoded(form, stacked[name.rpartition(".")[2]], matrix) for matrix in weight]
        joined = {role: torch.stack([part[role] for part, _ in parts]) for role in parts[0][0]}
        if "weight_shape" in joined:
            joined["weight_shape"] = torch.tensor(weight.shape)
        return joined, torch.stack([values for _, values in parts])

    groups = {
        "group_0": ("pack-quantized", ["re:.*gate_up_proj"], stacked["gate_up_proj"]),
        "group_1": ("float-quantized", ["re:.*experts.down_proj"], stacked["down_proj"]),
    }
    written = write(tmp_path, "moe", encode, config(groups))
    source = check(tmp_path, written, {"experts.gate_up_proj": "grouped", "experts.down_proj": "fp8"})
    assert isinstance(source.encoded("model.layers.0.mlp.experts.gate_up_proj", 100, 300), Grouped)
    assert_serves(tmp_path, "moe", written)


def test_order_of_columns_in_old_files(tmp_path: Path) -> None:
    """`weight_g_idx`: decoded only, unless it says nothing new."""
    weights = args(4, group_size=64)

    def encode(name: str, weight: Tensor) -> Encoded | None:
        if not LINEAR.fullmatch(name):
            return None
        order = torch.arange(weight.shape[1]) // 64
        if "mlp" in name:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
        sorted_columns = torch.argsort(order, stable=True)
        parts, values = encoded("pack-quantized", weights, weight[:, sorted_columns])
        codes = unpack(parts["weight_packed"], 4, weight.shape[1]).short() - 8
        back = torch.argsort(sorted_columns)
        packed = encoded("pack-quantized", weights, weight)[0]
        packed |= {"weight_scale": parts["weight_scale"], "weight_g_idx": order.to(torch.int32)}
        packed["weight_packed"] = pack_to_int32(codes[:, back].to(torch.int8), 4)
        return packed, values[:, back]

    written = write(tmp_path, "dense", encode, config({"group_0": ("pack-quantized", ["Linear"], weights)}))
    formats = {".mlp.": "bf16", "_proj.": "int4-g64", "in_proj_qkv": "int4-g64", "in_proj_z": "int4-g64"}
    check(tmp_path, written, formats)
    with pytest.raises(ValueError, match="only decoded"):
        open_folder(tmp_path).encoded("model.layers.0.mlp.up_proj.weight", 0, 8)


def test_precedence_of_targets() -> None:
    """Exact names before regular expressions (in the order of their text) before classes, over all groups."""

    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {"num_bits": bits, "type": "int", "strategy": "channel"}}

    groups = {
        "a": group(8, "Linear", "re:.*mlp"),
        "b": group(4, "re:.*down_proj"),
        "c": group(3, "model.layers.0.mlp.up_proj"),
        "d": {"targets": ["re:.*self_attn$"], "weights": None},
    }
    declared = read_compressed_tensors({"config_groups": groups, "ignore": ["lm_head", "re:.*in_proj_[ab]$"]})

    def bits(module: str) -> list[int | None]:
        return [scheme.bits for scheme in declared.schemes(module)]

    assert bits("model.layers.0.mlp.down_proj") == [4, 8, 8]
    assert bits("model.layers.0.mlp.up_proj") == [3, 8, 8]
    assert bits("model.layers.0.self_attn.q_proj") == [8]
    assert bits("model.embed_tokens") == []
    assert bits("lm_head") == bits("model.layers.0.linear_attn.in_proj_a") == []
    assert Scheme("int", 4, 128).fits(Scheme("int", 4))
    assert not Scheme("int", 4, 128).fits(Scheme("int", 4, 64))
    assert str(Scheme("int", 4, 128)) == "4-bit int in groups of 128"
