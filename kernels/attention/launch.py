"""Shapes and GPU -> launches of the attention kernels. Pure functions, as data.

`python -m bench.attention_launches` measures others beside them. Those here were chosen by registers, shared memory and
programs a multiprocessor, as the compiler reports them.
"""

from dataclasses import dataclass

SCRATCH = 64 * 2**20
"""Bytes that `prefill` may decode coded K and V to: 16,384 tokens of the 27B, whose pages take 4 KiB a token plain."""
ROWS = 16
"""Query rows of a sequence up to which `decode` reads its context in splits; above, `prefill` has tiles enough."""


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    block_m: int
    """Queries of a program: positions times the query heads that share a K/V head. A power of two, 16 at least, for
    coded pages 8 at least."""
    block_n: int
    """Tokens a round (and slice); a power of two, 16 at least. A round's tokens divide the page."""
    warps: int
    stages: int
    splits: int
    """Of a sequence at most. With `least_pages`: a sequence's splits, and so its result to the last bit, depend on its
    own length and on these two, whatever else is in the batch."""
    least_pages: int = 1
    """Of a split."""
    tma: bool = False
    """K and V come by bulk copies, where the pool allows it (compute capability 9.0 and up)."""
    pdl: bool = False
    """Begin while the kernel before still runs (programmatic dependent launch, compute capability 9.0 and up)."""
    slices: int = 1
    """Of coded pages: parts of a round that do not wait for each other, best a warp each."""
    converts: bool = False
    """Of coded pages: the GPU converts from E4M3 (compute capability 8.9 and up)."""


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """As in DecodeLaunch."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
    early: bool = False
    """V is asked for before K and both are waited for at once: later, but without a barrier between the products."""
    scratch: int = SCRATCH
    """Bytes of K and V that coded pages are decoded to at once."""


def segment_tokens(sequences: int, longest: int, token_bytes: int, page: int, scratch: int = SCRATCH) -> int:
    """Of each sequence, whole pages, one at least: what is decoded at once for so many sequences of `longest` tokens at
    most. token_bytes: of plain K and V of a layer, 2 * kv_heads * head_dim * itemsize. So it takes
    sequences * segment_tokens(...) * token_bytes bytes."""
    return page * max(1, min(scratch // (sequences * token_bytes * page), -(-longest // page)))


def decode_launch(
    rows: int,
    group: int,
    head_dim: int,
    itemsize: int,
    kv_heads: int,
    processors: int,
    capability: tuple[int, int],
    code_bits: int | None = None,
) -> DecodeLaunch:
    """rows: the most of a sequence in the batch, 1 to ROWS. group: query heads that share a K/V head. itemsize: bytes
    of a number of q, and of plain pages. processors: multiprocessors. code_bits: of a dim in coded pages, those of K or
    V that are fewer; None: plain pages. Splits do not depend on `rows`."""
    roomy = capability[0] in (9, 10)  # 227 KiB of shared memory, against 99 on consumer GPUs
    head_bytes = head_dim * itemsize
    block_m = min(max(16, 1 << (rows * group - 1).bit_length()), 64 if itemsize == 2 else 16)
    block_n = 64 if head_bytes <= 256 else 32 if head_bytes <= 512 else 16
    stages = (4 if block_m == 16 else 3) if roomy else (3 if block_m < 64 else 2)
    # Two programs a multiprocessor for one sequence, rounded down: 64 splits are one round of `combine`, 66 are two.
    splits = min(128, max(16, 2 * processors // kv_heads // 16 * 16))
    pdl = capability >= (9, 0)
    if code_bits is not None:
        # A warp holds the sums of all its queries: with 16 of them registers are spilled. More than 8 read the codes
        # again, out of the L2.
        block_m = 8
        stages, slices = 3 if roomy else 2, 4 if itemsize == 2 else 1
        return DecodeLaunch(block_m, 16, 4, stages, splits, pdl=pdl, slices=slices, converts=capability >= (8, 9))
    return DecodeLaunch(
        block_m,
        block_n,
        8 if block_m == 64 else 4,
        stages,
        splits,
        tma=roomy and itemsize == 2 and code_bits is None,
        pdl=pdl,
    )


def prefill_launch(head_dim: int, itemsize: int, capability: tuple[int, int]) -> PrefillLaunch:
    """As in decode_launch. K and V are plain there, those of coded pages are made plain before."""
    if itemsize == 4:
        return PrefillLaunch(16 if head_dim > 128 else 32, 16, 4, 2)
    if capability[0] in (9, 10):
        return PrefillLaunch(128, 64, 8, 2, tma=True)
    return PrefillLaunch(64, 32 if head_dim > 128 else 64, 8 if head_dim > 128 else 4, 2)
