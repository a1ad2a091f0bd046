"""What one step of a decoder takes beside weights and cache, from its shape: an upper bound that follows the code of
`services.engine.model`, stage by stage. No torch.

A stage is the place within a layer (or before, or behind all of them) where most is alive: the residual stream, the
operands, the temporaries of PyTorch's eager operations, and what a kernel takes for itself. A layer's stages follow
each other, and so do the layers, so a step takes as much as its largest stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.engine.model.config import ModelConfig
from services.engine.model.hybrid_config import DeltaNetConfig, ExpertsConfig, HybridConfig

Device = Literal["cpu", "cuda"]
Cached = Literal["plain", "coded"]
"""K and V as they are, or in fewer bits."""

GATHERS: Mapping[tuple[Device, Cached], bool] = {
    ("cpu", "plain"): True,
    ("cpu", "coded"): True,
    ("cuda", "plain"): False,
    ("cuda", "coded"): False,
}
"""Whether attention copies the K and V of a layer that a step reads (`kernels.attention.reference`), or reads them
where they lie in the pages."""
_SPLITS = 128
"""Parts at most that a context is read in on a GPU (`kernels.attention.launch`), each with a result of its own."""
_SCRATCH = 64 * 2**20
"""Coded pages that a GPU's prefill decodes at once (`kernels.attention.launch.SCRATCH`)."""
_INDICES = 64
"""Bytes a token for positions, pages, offsets and borders."""
_CHUNK = 64
"""Tokens that the chunked form of the gated delta rule solves at once."""
_QUERY_TILE = 512
"""Queries that see a copied context at once: by a mask that has a byte a pair, and again as numbers."""
_CODED_ROW = 16
"""Bytes an element of K or V while it is decoded: float32 codes, scales and their product."""
_DECODED = 24
"""Bytes an element at most while rows of a packed matrix are decoded by `kernels.embedding`: int64 words among them."""
_DRAWN = 2**17
"""Bytes a row of a draw's workspace and tables, at most."""
_DRAW_ELEMENTS, _DRAW_BYTES = 2**22, 40
"""Of logits that `kernels.sampling` draws from at once, in about five float64 copies."""
_LIBRARIES = {"cpu": 0, "cuda": 64 * 2**20}
"""Workspaces that cuBLAS and cuBLASLt have PyTorch allocate: 32 MiB each on Hopper, less on others."""


@dataclass(frozen=True, slots=True)
class Step:
    """The largest that is planned for."""

    tokens: int
    running: int
    """Sequences that take part."""
    drawn: int
    """Rows of logits."""
    context: int
    """Tokens of all its sequences."""


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    token: int
    """Bytes a token of the step."""
    fixed: int = 0
    """Bytes whatever the step has."""
    sequence: int = 0
    """Bytes a sequence."""
    context: int = 0
    """Bytes a token of all its sequences."""

    def bytes(self, step: Step) -> int:
        own = self.token * step.tokens + self.fixed
        return own + self.sequence * step.running + self.context * step.context


@dataclass(frozen=True, slots=True)
class Workspace:
    stages: tuple[Stage, ...]
    stream: int
    """Bytes a token of the residual stream, which is still there when the logits are made."""
    vocab_size: int
    logit: int
    """Bytes an element of the logits, with the copies that sampling makes."""
    fixed: int = 0
    captured: int = 0
    """Bytes a sequence that decodes as graphs keep from step to step; 0 where none are captured."""

    def decodes(self, rows: int) -> int:
        """Of graphs of up to so many sequences: memory of their own for a step, and what they keep."""
        if not self.captured:
            return 0
        return self.captured * rows + self.bytes(Step(rows, rows, rows, 0)) - self.fixed

    def peak(self, step: Step) -> Stage:
        """The largest of the stages."""
        return max(self.stages, key=lambda stage: stage.bytes(step))

    def logits(self, step: Step) -> int:
        """Of what there is when the step is drawn from."""
        elements = step.drawn * self.vocab_size
        drawn = min(elements, max(_DRAW_ELEMENTS, self.vocab_size))
        return self.stream * step.tokens + elements * self.logit + drawn * _DRAW_BYTES

    def bytes(self, step: Step) -> int:
        return max(self.peak(step).bytes(step), self.logits(step)) + self.fixed


def workspace(
    config: ModelConfig | HybridConfig, itemsize: int, inner: int, device: Device, cached: Cached, tile: int
) -> Workspace:
    """`itemsize`: of an element of the model's dtype; `inner`: of the dtype within gated delta nets; `cached`: K and V
    in the pages; `tile`: bytes of the largest piece of a packed matrix that is decoded at once."""
    row = config.kv_heads * config.head_dim
    decoded = 2 * itemsize + (_CODED_ROW if cached == "coded" else 0)
    copied = row * decoded + _QUERY_TILE * (1 + itemsize) if GATHERS[device, cached] else 0
    parts = 0 if device == "cpu" else 4 * config.heads * _SPLITS * (config.head_dim + 1)
    scratch = _SCRATCH if device == "cuda" and cached == "coded" else 0
    stages = (
        _hybrid_stages(config, itemsize, inner, device, tile, copied, parts, scratch)
        if isinstance(config, HybridConfig)
        else _dense_stages(config, itemsize, tile, copied, parts, scratch)
    )
    return Workspace(
        stages=stages,
        stream=config.hidden_size * (4 if isinstance(config, HybridConfig) else itemsize),
        vocab_size=config.vocab_size,
        logit=itemsize + 4 + 4,
        fixed=_LIBRARIES[device],
        captured=0 if device == "cpu" else _captured(config, itemsize, inner),
    )


def _captured(config: ModelConfig | HybridConfig, itemsize: int, inner: int) -> int:
    """What the draw works in; and of states the inputs of their update (`kernels.gated_delta.Records`) and a hidden
    vector."""
    if not isinstance(config, HybridConfig):
        return _DRAWN
    net = config.delta_net
    moved = inner * (net.channels - net.key_heads * net.key_dim) + itemsize * net.channels + 8 * net.value_heads
    return _DRAWN + config.delta_net_layers * moved + itemsize * config.hidden_size


def _hybrid_stages(
    config: HybridConfig, s: int, inner: int, device: Device, tile: int, copied: int, parts: int, scratch: int
) -> tuple[Stage, ...]:
    """The residual stream is float32: 4 bytes an element, and twice while a layer's second half runs."""
    hidden = config.hidden_size
    base = 4 * hidden + 4 * config.rotary_dim + _INDICES
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    normed = base + s * hidden  # the mixer's input, which lives as long as the layer runs
    return (
        Stage("embedding", (s + _DECODED) * hidden + _INDICES),
        Stage("norm", normed + 4 * hidden + 12 * hidden),
        *_attention_stages(normed, q, kv, s, 2 * q + 2 * kv, tile, copied, parts, scratch),
        *_delta_stages(config.delta_net, normed, s, inner, device, tile),
        *_mlp_stages(config.mlp, normed + 4 * hidden, hidden, s, tile),
    )


def _dense_stages(config: ModelConfig, s: int, tile: int, copied: int, parts: int, scratch: int) -> tuple[Stage, ...]:
    hidden = config.hidden_size
    base = s * hidden + 4 * config.head_dim + _INDICES
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return (
        Stage("embedding", (s + _DECODED) * hidden + _INDICES),
        Stage("norm", base + s * hidden + 12 * hidden),
        *_attention_stages(base + s * hidden, q, kv, s, q + 2 * kv, tile, copied, parts, scratch),
        *_mlp_stages(config.intermediate_size, base + s * hidden, hidden, s, tile),
    )


def _attention_stages(
    base: int, q: int, kv: int, s: int, projected: int, tile: int, copied: int, parts: int, scratch: int
) -> tuple[Stage, ...]:
    """`base`: with the normed input; `projected`: outputs of the projection of q, k, v and of the gate; `copied`: bytes
    of K and V a token of context, 0 where they are read in the pages; `parts`: of results for parts of the context, a
    sequence; `scratch`: of pages that are decoded at once."""
    projection = base + s * projected
    return (
        Stage("attention projection", projection, tile),
        Stage("attention norm and rope", projection + 12 * q + s * (q + kv)),
        # q, k and v behind the rotation; on a CPU the result as tiles, joined, and where it belongs; on a GPU the
        # result, and the sums that go from one piece of the context to the next.
        Stage(
            "attention on copied K and V" if copied else "attention",
            projection + s * (q + 2 * kv) + 3 * s * q,
            fixed=scratch,
            sequence=parts,
            context=copied,
        ),
    )


def _delta_stages(net: DeltaNetConfig, base: int, s: int, inner: int, device: Device, tile: int) -> tuple[Stage, ...]:
    value = net.value_heads * net.value_dim
    wide = net.value_heads * net.key_dim
    projected = net.channels + value
    # What is projected is float32 and lives as long as the gate z, a view of it.
    live = base + 4 * projected + inner * net.channels
    pairs = net.value_heads * _CHUNK
    if device == "cpu":
        # `kernels.gated_delta.reference.chunked`, in float32: q and k for each value head and, filled up to whole
        # chunks, again with v; what solves the system; decays, system and the product within a chunk; what reads and
        # writes the state; the result in pieces, joined, and as it is returned.
        rule = 4 * (7 * wide + 5 * value + 3 * pairs + 2 * net.key_heads * net.key_dim)
    else:
        # flash-linear-attention: the products of a chunk and their inverse (float32 and rounded); w and u; a state for
        # each chunk; the new values, and the result twice.
        states = inner * net.value_heads * net.key_dim * net.value_dim // _CHUNK
        rule = inner * (wide + 5 * value) + pairs * (8 + inner) + states + 12 * net.value_heads
    # On a CPU: columns and inputs in one, their weighted sum, its SiLU and that within float16's range.
    convolved = 16 * net.channels if device == "cpu" else 0
    return (
        Stage("delta net projection", base + (s + 4) * projected, tile),
        Stage("delta net convolution", live + convolved),
        # The states are taken out of the pool, and put back.
        Stage("gated delta rule", live + rule, sequence=2 * 4 * net.value_heads * net.key_dim * net.value_dim),
        Stage("delta net norm", live + inner * value + 16 * value + s * value),
    )


def _mlp_stages(mlp: int | ExpertsConfig, base: int, hidden: int, s: int, tile: int) -> tuple[Stage, ...]:
    """`base`: with all that lives behind the mixer, without the normed input."""
    if isinstance(mlp, int):
        # [gate | up], silu(gate) and its product with up.
        return (
            Stage("mlp up", base + s * hidden + 2 * s * mlp, tile),
            Stage("mlp", base + s * hidden + 4 * s * mlp),
        )
    # The normed input in float32 and in s, the sum of the experts, what one expert reads and gives where all tokens
    # choose it, the choice itself; the expert's matrices are decoded one at a time.
    routed = base + (4 + s + 4) * hidden + (s + 4 + 4) * hidden + 4 * s * mlp.width + 8 * mlp.count + 48 * mlp.chosen
    decoded = 2 * mlp.width * hidden * _DECODED if tile else 0
    return (
        Stage("experts", routed, max(tile, decoded)),
        Stage("shared expert", base + (4 + s + 8) * hidden + 4 * s * mlp.shared_width, tile),
    )
