"""Tensors of a GGUF file by the names of `transformers`: how they are called there, and what was done to them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from services.engine.model.config import ModelConfig
from services.engine.model.family import DecoderConfig
from services.engine.model.hybrid_config import ExpertsConfig, HybridConfig
from services.engine.weights.gguf_file import GgufTensor
from services.engine.weights.gguf_order import GatesAndUps, Halves, Order, Tiled

ROPE_FACTORS = "rope_freqs.weight"
SCALES = (".scale", ".input_scale")
"""Ends of names beside an NVFP4 tensor; the second one is about activations, which we do not quantize by it."""

Change = Literal["none", "1 + w", "-exp(w)"]
"""What the file holds in place of w."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DENSE = {**_ATTENTION, "ffn_norm": "post_attention_layernorm"}
_HYBRID = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_HYBRID_WHOLE = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
"""Whose last part differs too."""
_MTP = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head_norm": "norm"}
_GATES, _UPS = "ffn_gate_exps.weight", "ffn_up_exps.weight"

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_QK = re.compile(r"self_attn\.[qk]_proj\.(weight|bias)$")
_PLAIN_NORM = "linear_attn.norm.weight"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of ours in the file."""

    parts: tuple[GgufTensor, ...]
    """Of one type and shape, their rows one behind the other."""
    shape: tuple[int, ...]
    """Ours; all but the last dim are its rows."""
    rows: Order | None = None
    columns: Tiled | None = None
    change: Change = "none"

    @property
    def row_count(self) -> int:
        """1-D tensors have rows of one element."""
        return self.shape[0] if len(self.shape) == 1 else prod(self.shape[:-1])


def placed(tensors: Mapping[str, GgufTensor], config: DecoderConfig) -> dict[str, Stored]:
    """By our name, or by the file's own where we know none."""
    weights = {name: t for name, t in tensors.items() if name != ROPE_FACTORS and not _side(name, tensors)}
    if isinstance(config, ModelConfig):
        return {_dense_name(name): _dense(_dense_name(name), t, config) for name, t in weights.items()}
    found: dict[str, Stored] = {}
    for name, tensor in weights.items():
        match = _LAYER.fullmatch(name)
        if match and match[2] in (_GATES, _UPS) and isinstance(config.mlp, ExpertsConfig) and len(tensor.shape) == 3:
            gates, ups = (tensors.get(f"blk.{match[1]}.{part}") for part in (_GATES, _UPS))
            prefix = f"{_prefix(int(match[1]), config)}.mlp.experts"
            found |= _gates_and_ups(prefix, gates, ups)
        else:
            ours = _hybrid_name(name, config)
            found[ours] = _hybrid(ours, tensor, config)
    return found


def stored_name(name: str, config: DecoderConfig) -> str:
    """What the file should call a tensor that it lacks."""
    if name.startswith("mtp.") and isinstance(config, HybridConfig):
        layer, rest = len(config.layer_types), name.removeprefix("mtp.")
        rest = rest.removeprefix("layers.0.")
        names = {f"nextn.{stored}.weight": f"{ours}.weight" for stored, ours in _MTP.items()}
    elif match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        layer, rest = int(match[1]), match[2]
        names = {}
    else:
        return next((f"{top}.weight" for top, ours in _TOP.items() if name == f"{ours}.weight"), name)
    table = _DENSE if isinstance(config, ModelConfig) else _HYBRID
    names |= {f"{stored}.{kind}": f"{ours}.{kind}" for stored, ours in table.items() for kind in ("weight", "bias")}
    if isinstance(config, HybridConfig):
        names |= _HYBRID_WHOLE
    return next((f"blk.{layer}.{stored}" for stored, ours in names.items() if ours == rest), name)


def scale_name(stored: str) -> str:
    """Of the scale beside an NVFP4 tensor."""
    return stored.removesuffix(".weight") + SCALES[0]


def _side(name: str, tensors: Mapping[str, GgufTensor]) -> bool:
    return any(name.endswith(end) and name.removesuffix(end) + ".weight" in tensors for end in SCALES)


def _dense_name(stored: str) -> str:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_DENSE[part]}.{kind}" if part in _DENSE else stored
    part, _, kind = stored.rpartition(".")
    return f"{_TOP[part]}.{kind}" if part in _TOP else stored


def _dense(name: str, tensor: GgufTensor, config: ModelConfig) -> Stored:
    # The converter reorders the rows of q and k of this architecture only.
    moved = config.architecture == "llama" and _QK.search(name) is not None
    return Stored((tensor,), tensor.shape, rows=Halves(config.head_dim) if moved else None)


def _prefix(layer: int, config: HybridConfig) -> str:
    return f"model.layers.{layer}" if layer < len(config.layer_types) else "mtp.layers.0"


def _hybrid_name(stored: str, config: HybridConfig) -> str:
    match = _LAYER.fullmatch(stored)
    if match is None:
        part, _, kind = stored.rpartition(".")
        return f"{_TOP[part]}.{kind}" if part in _TOP else stored
    layer, rest = int(match[1]), match[2]
    part, _, kind = rest.rpartition(".")
    if rest in _HYBRID_WHOLE:
        return f"{_prefix(layer, config)}.{_HYBRID_WHOLE[rest]}"
    if part in _HYBRID:
        return f"{_prefix(layer, config)}.{_HYBRID[part]}.{kind}"
    if layer == len(config.layer_types) and part.startswith("nextn.") and part.removeprefix("nextn.") in _MTP:
        return f"mtp.{_MTP[part.removeprefix('nextn.')]}.{kind}"
    return stored


def _hybrid(name: str, tensor: GgufTensor, config: HybridConfig) -> Stored:
    net = config.delta_net
    kind = name.rpartition("linear_attn.")[2]
    shape, rows, columns = tensor.shape, None, None

    def tiled(width: int, first: int = 0) -> Tiled | None:
        ratio = net.value_heads // net.key_heads
        return Tiled(net.key_heads, ratio, width, first) if ratio > 1 else None

    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        rows = tiled(net.value_dim, 2 * net.key_heads * net.key_dim)
    elif kind == "in_proj_z.weight":
        rows = tiled(net.value_dim)
    elif kind in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        rows = tiled(1)
    elif kind == "out_proj.weight":
        columns = tiled(net.value_dim)
    if kind == "conv1d.weight" and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    elif name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, shape[0])
    change: Change = "none"
    if kind == "A_log":
        change = "-exp(w)"
    elif name.startswith(("model.", "mtp.")) and "norm" in name.split(".")[-2] and not name.endswith(_PLAIN_NORM):
        change = "1 + w"
    return Stored((tensor,), shape, rows, columns, change)


def _gates_and_ups(prefix: str, gates: GgufTensor | None, ups: GgufTensor | None) -> dict[str, Stored]:
    """As one tensor where both are of one type; else expert by expert, as older files of `transformers` have them."""
    if gates is not None and ups is not None and (gates.kind, gates.shape) == (ups.kind, ups.shape):
        experts, width, hidden = gates.shape
        rows = GatesAndUps(experts, width)
        return {f"{prefix}.gate_up_proj": Stored((gates, ups), (experts, 2 * width, hidden), rows)}
    return {
        f"{prefix}.{expert}.{part}.weight": Stored((tensor.piece(expert),), tensor.shape[1:])
        for tensor, part in ((gates, "gate_proj"), (ups, "up_proj"))
        if tensor is not None
        for expert in range(tensor.shape[0])
    }
