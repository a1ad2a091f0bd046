"""How wrong attention comes out when K and V are stored in fewer bits: on drawn K and V that have what those of real
models have, heavy tails and channels that are far larger than the others in every token."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import StudentT

from kernels.attention import paged_attention, plan_attention
from kernels.kv_codec import KvFormat, kv_form, layer_views, write
from kernels.norm_rope import rotary_angles, rotate

HEAD_DIM = 256
KV_HEADS = 2
GROUP = 6
"""Query heads a KV head."""
QUERIES = 16
"""The last tokens of the sequence."""
ROTARY_DIM = 64
THETA = 1e7
PAGE_TOKENS = 64
_BLOCK = 8192
"""Tokens that are written at a time: bounds the codec's temporaries."""
_GAIN = 1.0
"""Of the queries: random scores have about this standard deviation."""
_LOOKED_FOR = (0.4, 1.2)
"""How much of a query is the key that it looks for: from the first query of a head to the last."""
_WIDEST = 30.0
"""Draws of t are cut there."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Norms and position encoding applied."""

    q: Tensor
    """[QUERIES, KV_HEADS * GROUP, HEAD_DIM]."""
    k: Tensor
    """[depth, KV_HEADS, HEAD_DIM], as v."""
    v: Tensor


def draw(depth: int, seed: int) -> Sequence:
    """K: Student's t with 4 degrees of freedom, channels of different spread (log-normal, 0.5), four a head with an
    offset of 8 in every token; then the norm and the position encoding of the 27B. V: t with 3 degrees, such channels,
    three a head ten times as wide. A query is noise, a share of the channels with offset, and the key of one token
    that it looks for."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # torch.distributions knows no generator
    shape = (depth, KV_HEADS, HEAD_DIM)

    def spread() -> Tensor:
        return (0.5 * torch.randn(KV_HEADS, HEAD_DIM, generator=generator)).exp()

    offset = torch.zeros(KV_HEADS, HEAD_DIM)
    v_spread = spread()
    for head in range(KV_HEADS):
        channels = torch.randperm(HEAD_DIM, generator=generator)
        offset[head, channels[:4]] = torch.tensor([8.0, -8.0, 8.0, -8.0])
        v_spread[head, channels[4:7]] *= 10
    k = _normed(_student(4.0, shape) * spread() + offset)
    v = _student(3.0, shape) * v_spread

    heads = KV_HEADS * GROUP
    looked_for = torch.randint(0, depth, (QUERIES, heads), generator=generator)
    owner = torch.arange(heads) // GROUP
    noise = torch.randn(QUERIES, heads, HEAD_DIM, generator=generator)
    target = k[looked_for, owner] - 0.7 * _normed(offset)[owner]
    positions = torch.arange(depth)
    # The query looks from the token's own position, so that the encoding does not hide it.
    cos, sin = rotary_angles(looked_for.flatten(), _frequencies())
    share = torch.linspace(*_LOOKED_FOR, QUERIES)[:, None, None]
    q = rotate(_GAIN * (noise + share * target).flatten(0, 1)[:, None], cos, sin)
    return Sequence(q.view(QUERIES, heads, HEAD_DIM), rotate(k, *rotary_angles(positions, _frequencies())), v)


def attend(sequence: Sequence, format: KvFormat) -> Tensor:
    """Through pages of that format, by the engine's own operations; like q."""
    form = kv_form(format, torch.float32)
    count = -(-len(sequence.k) // PAGE_TOKENS)
    size = PAGE_TOKENS * KV_HEADS * form.row_bytes(HEAD_DIM)
    pool = torch.zeros((count + 1, size), dtype=torch.uint8)
    (layer,) = layer_views(pool, form, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
    for first in range(0, len(sequence.k), _BLOCK):
        places = torch.arange(first, min(first + _BLOCK, len(sequence.k)))
        k, v = sequence.k[places], sequence.v[places]
        write(layer, k, v, places // PAGE_TOKENS, places % PAGE_TOKENS)
    # Every query sees all tokens, and in a span each would see those up to its own place only. So the heads of all
    # queries are as many heads of one.
    plan = plan_attention([1], [len(sequence.k)], [range(count)], PAGE_TOKENS, count, torch.device("cpu"))
    heads = sequence.q.unflatten(1, (KV_HEADS, GROUP)).transpose(0, 1).flatten(1, 2)
    out = paged_attention(heads.flatten(0, 1)[None], layer, plan, HEAD_DIM**-0.5)[0]
    return out.view(KV_HEADS, QUERIES, GROUP, HEAD_DIM).transpose(0, 1).flatten(1, 2)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def rotations(sequence: Sequence) -> Iterator[tuple[str, float]]:
    """The error with the 4-bit integers of rk4v4 and no rotation, one of each 64 dims, one of the whole head."""
    rows = kv_form("rk4v4", torch.float32).keys
    exact = _attention(sequence.q, sequence.k, sequence.v)
    for name, size in (("none", 1), ("64", 64), ("256", 256)):
        matrix = torch.block_diag(*[_hadamard(size)] * (HEAD_DIM // size))
        q, k, v = (part @ matrix for part in (sequence.q, sequence.k, sequence.v))
        k, v = (rows.decode(*rows.encode(part)) for part in (k, v))
        yield name, relative_error(_attention(q, k, v) @ matrix, exact)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.unflatten(1, (KV_HEADS, GROUP))
    shares = (torch.einsum("qhgd,khd->qhgk", grouped, k) * HEAD_DIM**-0.5).softmax(-1)
    return torch.einsum("qhgk,khd->qhgd", shares, v).flatten(1, 2)


def _student(freedom: float, shape: tuple[int, int, int]) -> Tensor:
    return StudentT(freedom).sample(shape).clamp(-_WIDEST, _WIDEST)


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / size**0.5


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _frequencies() -> Tensor:
    return THETA ** -(torch.arange(0, ROTARY_DIM, 2) / ROTARY_DIM)
