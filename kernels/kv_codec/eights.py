# pyrefly: ignore-errors
"""A row of D dims as eight tensors of D / 8, for the kernels: dim 8 j + i is element j of the i-th.

So the eight dims that share a code word (and a point of E8) are in one thread, and sums over them have a stated order.
"""

import triton
import triton.language as tl


@triton.jit
def eights(x, COUNT: tl.constexpr):
    """[8 COUNT] -> eight of [COUNT]."""
    even, odd = tl.split(x.reshape(COUNT, 2, 2, 2))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def row(xs, COUNT: tl.constexpr):
    """The inverse."""
    even = tl.join(tl.join(xs[0], xs[4]), tl.join(xs[2], xs[6]))
    odd = tl.join(tl.join(xs[1], xs[5]), tl.join(xs[3], xs[7]))
    return tl.join(even, odd).reshape(COUNT * 8)


@triton.jit
def total(xs):
    """((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))"""
    return ((xs[0] + xs[1]) + (xs[2] + xs[3])) + ((xs[4] + xs[5]) + (xs[6] + xs[7]))


@triton.jit
def largest(xs):
    out = xs[0]
    for i in tl.static_range(1, 8):
        out = tl.maximum(out, xs[i])
    return out


@triton.jit
def spread(x, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """One number for each group of dims, [GROUPS], for each of its words: [COUNT]."""
    return tl.broadcast_to(x[:, None], (GROUPS, COUNT // GROUPS)).reshape(COUNT)


@triton.jit
def rotated(xs, COUNT: tl.constexpr):
    """`hadamard.rotate`: sums and differences of dims of distance 1, 2 and 4, and turned over those of 8, 16 and 32."""
    xs = _turned_over(_butterflies(xs), COUNT)
    xs = _turned_over(_butterflies(xs), COUNT)
    return [x * 0.125 for x in xs]


@triton.jit
def _butterflies(xs):
    for round in tl.static_range(3):
        xs = [
            xs[i] + xs[i + 2**round] if (i >> round) % 2 == 0 else xs[i - 2**round] - xs[i]
            for i in (0, 1, 2, 3, 4, 5, 6, 7)
        ]
    return xs


@triton.jit
def _turned_over(xs, COUNT: tl.constexpr):
    """Dims 8 j + i and 8 i + j of each 64 change places."""
    return eights(row(xs, COUNT).reshape(COUNT // 8, 8, 8).permute(0, 2, 1).reshape(COUNT * 8), COUNT)
