"""Which tensors of a decoder are large matrices, and which of those the kernels read as one."""

import re

_MATRIX = re.compile(
    r"(?:.*\.)?(?:embed_tokens|lm_head|fc|[qkvo]_proj|in_proj_qkv|in_proj_z|out_proj|(?:gate|up|down)_proj)\.weight"
    r"|.*\.experts\.(?:gate_up|down)_proj"
)
_FUSED = (
    (re.compile(r"(.*\.self_attn)\.([qkv])_proj\.weight"), "qkv_proj", ("q", "k", "v")),
    (re.compile(r"(.*\.linear_attn)\.in_proj_(qkv|z)\.weight"), "in_proj_qkvz", ("qkv", "z")),
    (re.compile(r"(.*\.experts)\.(?:\d+)\.(gate|up)_proj\.weight"), "gate_up_proj", ("gate", "up")),
    (re.compile(r"(.*\.experts)\.(?:\d+)\.(down)_proj\.weight"), "down_proj", ("down",)),
    (re.compile(r"(.*)\.(gate|up)_proj\.weight"), "gate_up_proj", ("gate", "up")),
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def is_matrix(name: str) -> bool:
    """What a recipe may quantize. Norms, convolutions, decays, routers and the narrow projections of the gated delta
    net's a and b are no such: they are small, and a model suffers most from errors in them."""
    return _MATRIX.fullmatch(name) is not None


def alone(name: str) -> str:
    """The name of a group of this tensor only."""
    return name.removesuffix(".weight") if is_matrix(name) else name


def fused(name: str) -> tuple[str, tuple[int, int]]:
    """The group that the kernels would read a tensor in, and the order of its parts there: experts one after the other,
    and q, k, v (q with its gate); qkv, z; gate, up."""
    for pattern, group, parts in _FUSED:
        if match := pattern.fullmatch(name):
            expert = _EXPERT.search(name)
            return f"{match[1]}.{group}", (int(expert[1]) if expert else 0, parts.index(match[2]))
    return alone(name), (0, 0)


def in_order(name: str) -> list[tuple[int, str]]:
    """A sort key: layer 2 before layer 10."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in name.split(".")]
