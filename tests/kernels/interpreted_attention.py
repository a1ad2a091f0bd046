"""The attention kernels on CPU tensors, in Triton's interpreter: a process of its own, since TRITON_INTERPRET is read
when the kernels are defined. Its bfloat16 products are wrong, so there the kernels compute in float32.

With arguments: over pages of these coded formats instead of plain ones.
"""

import sys
from dataclasses import replace
from typing import get_args

import torch

from kernels.attention.batch import PagedBatch
from kernels.attention.decode import decode, decode_workspace
from kernels.attention.launch import DecodeLaunch, PrefillLaunch
from kernels.attention.prefill import prefill
from kernels.attention.segments import Segments
from kernels.attention.shapes import code_bits
from kernels.kv_codec import KvFormat, kv_form, write
from tests.kernels.paged_sequences import PagedSequences, paged_sequences

BOUNDS = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
"""Of the output's rounding; the interpreter's bfloat16 is cut off."""
ROTATED = 3
"""Times as much where queries and output are rotated, since both are rounded once more."""
CODED: list[KvFormat] = [name for name in get_args(KvFormat) if name not in ("auto", "bf16")]


def check(out: torch.Tensor, case: PagedSequences) -> None:
    assert out[-1].isnan().all()  # the row of nobody is not written to
    expected = case.expected()[:-1]
    error = ((out[:-1].double() - expected).abs() / (expected.abs() + 1)).max()
    bound = BOUNDS[out.dtype] * (ROTATED if case.kv.form.rotated else 1)
    assert float(error) < bound, (case.kv.form.name, out.dtype, case.counts, case.contexts, float(error))


def decoded(case: PagedSequences, launch: DecodeLaunch) -> torch.Tensor:
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    heads, dim = case.q.shape[1:]
    workspace = decode_workspace(len(case.q), heads, dim, launch.splits, case.q.device).fill_(torch.nan)
    rows, longest = max(case.counts), max(case.contexts)
    decode(case.q, case.kv, case.batch, case.scale, launch, workspace, out, rows, longest)
    return out


def prefilled(case: PagedSequences, launch: PrefillLaunch) -> torch.Tensor:
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    rows, longest = max(case.counts), max(case.contexts)
    segments = None if code_bits(case.kv.form) is None else poisoned(case, longest, launch)
    prefill(case.q, case.kv, case.batch, case.scale, launch, out, rows, segments)
    return out


def poisoned(case: PagedSequences, longest: int, launch: PrefillLaunch) -> Segments:
    segments = Segments.of(case.q, case.kv, len(case.counts), longest, launch)
    carry = segments.carry
    for tensor in (segments.plain.keys.codes, segments.plain.values.codes, *(carry.all if carry else ())):
        tensor.fill_(torch.nan)
    return segments


def plain() -> None:
    launch = DecodeLaunch(16, 32, 4, 2, splits=4, least_pages=1)
    # One row each, a spare place, lengths about the page; and the longest.
    check(decoded(case := paged_sequences((1, 1, 0, 1, 1), (1, 63, 5, 64, 65), 4, 2, 16, torch.float32), launch), case)
    check(decoded(case := paged_sequences((1,), (4097,), 2, 1, 16, torch.bfloat16), launch), case)
    # Verify: splits that begin behind some of the queries, more queries than a tile has.
    verify = paged_sequences((5, 1, 16, 3), (66, 129, 135, 3), 3, 1, 16, torch.float16, seed=1)
    check(whole := decoded(verify, launch), verify)
    check(decoded(verify, DecodeLaunch(64, 16, 4, 2, splits=7, least_pages=2)), verify)
    assert torch.equal(decoded(verify, replace(launch, tma=True))[:-1], whole[:-1])
    # A sequence alone: the same bits.
    first, tables = sum(verify.counts[:2]), verify.tables[2:3]
    batch = PagedBatch.of((16,), (135,), tables, verify.q.device)
    alone = replace(verify, q=verify.q[first : first + 17], batch=batch, counts=(16,), contexts=(135,), tables=tables)
    assert torch.equal(decoded(alone, launch)[:16], whole[first : first + 16])

    many = PrefillLaunch(32, 32, 4, 2)
    check(whole := prefilled(verify, many), verify)
    for early in (False, True):
        assert torch.equal(prefilled(verify, replace(many, tma=True, early=early))[:-1], whole[:-1])
    check(prefilled(case := paged_sequences((65, 0, 40), (65, 9, 170), 6, 2, 16, torch.float32, seed=2), many), case)
    check(prefilled(case := paged_sequences((1, 63, 64), (1, 63, 64), 2, 1, 32, torch.bfloat16, seed=3), many), case)
    check(prefilled(case := paged_sequences((5,), (4097,), 2, 1, 16, torch.float16, seed=4), many), case)


def coded(name: KvFormat) -> None:
    """Each bit of the format in float32, where bfloat16's places are used, and in float16, which has its own."""
    launch = DecodeLaunch(8, 16, 4, 2, splits=2, slices=2)
    whole = paged_sequences((1, 0, 3), (65, 5, 67), 2, 2, 64, torch.float32, form=kv_form(name, torch.float32))
    check(decoded(whole, launch), whole)
    # What has overflowed does not come back as something plausible; it stays within its sequence and head.
    page = torch.tensor(whole.tables[2][:1])
    token = torch.ones(1, 2, 64)
    token[0, 1, 3] = torch.inf
    write(whole.kv, token, token, page, torch.tensor([7]))
    out = decoded(whole, launch)
    assert out[:4, 0].isfinite().all()
    assert out[0].isfinite().all()
    assert not out[1:4, 1].isfinite().any()
    half = paged_sequences((2,), (65,), 2, 1, 256, torch.float16, form=kv_form(name, torch.float16))
    check(decoded(half, replace(launch, block_m=16, slices=4)), half)
    decodes(name)
    if name in ("fp8", "rk4v4-e8"):  # `prefill` itself does not know the format
        segmented(name)


def decodes(name: KvFormat) -> None:
    """Segments hold, but for tiles behind a sequence's end, what the codec decodes, rotated back and rounded once."""
    case = paged_sequences(
        (17, 0, 5), (130, 9, 66), 2, 2, 128, torch.float32, seed=5, form=kv_form(name, torch.float32)
    )
    segments = poisoned(case, 130, PrefillLaunch(32, 32, 4, 2, scratch=0))
    assert (segments.tokens, segments.count) == (64, 3)
    read = [(case.kv.keys, segments.plain.keys.codes), (case.kv.values, segments.plain.values.codes)]
    for segment in range(3):
        segments.fill(case.kv, case.batch, segment)
        for sequence, (context, table) in enumerate(zip(case.contexts, case.tables, strict=True)):
            if not case.counts[sequence]:  # a spare place, whose table may name no pages
                assert segments.plain.keys.codes[sequence].isnan().all()
                continue
            held = min(64, context - 64 * segment)
            for rows, plain in read:
                if held > 0:
                    expected = case.read(rows, table[segment : segment + 1])[:held].float()
                    assert torch.allclose(plain[sequence, :held], expected, rtol=1e-6, atol=1e-6), (name, segment)


def segmented(name: KvFormat) -> None:
    """In one segment and in several, of which some end before a sequence begins to ask, or behind it: the same bits."""
    form = kv_form(name, torch.float16)
    case = paged_sequences((40, 0, 5, 30), (170, 9, 66, 192), 2, 1, 64, torch.float16, seed=6, form=form)
    one = PrefillLaunch(64, 32, 4, 2, tma=name == "fp8")
    check(whole := prefilled(case, one), case)
    for scratch in (0, 2 * 4 * 64 * 64 * 4):
        assert torch.equal(prefilled(case, replace(one, scratch=scratch))[:-1], whole[:-1])


if __name__ == "__main__":
    chosen = [name for name in CODED if name in sys.argv[1:]]
    for name in chosen:
        coded(name)
    if not chosen:
        plain()
    print("all right")
