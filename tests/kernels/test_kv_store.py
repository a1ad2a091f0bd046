"""The kernel that stores K and V: in the interpreter, compiled for GPUs that are not here, on a GPU at real shapes."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from kernels.kv_codec import KvFormat, kv_form
from kernels.kv_codec import triton as kernels
from kernels.kv_codec.e8 import E8Rows
from kernels.kv_codec.head_norm import HeadNorm
from kernels.kv_codec.launches import scheme, store
from tests.kernels.compiled import ahead_of_time, run_interpreted, usage
from tests.kernels.stored_rows import Pages, StoredRows, extreme_rows, stored_rows

FORMATS: tuple[KvFormat, ...] = get_args(KvFormat)
POINTERS = {"plain": "*bf16", "int8": "*i8", "fp8": "*u8", "e8-2": "*i16"}
"""Of codes; the others are words of 32 bits."""


def test_interpreted() -> None:
    """All formats, zeros to infinities, ties, nobody's tokens, poison beside what is written; see
    `interpreted_kv_store`."""
    run_interpreted("tests.kernels.interpreted_kv_store")


@pytest.mark.parametrize(("format", "capability"), [("nvfp4", 80), ("rk8v4", 89), ("fp8", 90), ("rk2v4-e8", 120)])
def test_compiled_ahead_of_time(format: KvFormat, capability: int) -> None:
    """27B: no registers are spilled, and no product is fused with a sum."""
    form = kv_form(format, torch.bfloat16)
    keys, key_group = scheme(form.keys, 256)
    values, value_group = scheme(form.values, 256)
    scale = {torch.float16: "*fp16", torch.uint8: "*u8"}
    pointers = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16"),
        **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
        **dict.fromkeys(("page_ptr", "offset_ptr"), "*i64"),
        "k_codes_ptr": POINTERS.get(keys, "*i32"),
        "v_codes_ptr": POINTERS.get(values, "*i32"),
        "k_scales_ptr": scale[form.keys.scale_dtype],
        "v_scales_ptr": scale[form.values.scale_dtype],
        "eps": "fp32",
    }
    shape: dict[str, object] = {"HEADS": 24, "KV_HEADS": 4, "D": 256, "TURNING": 64}
    codecs = {"KEYS": keys, "KEY_GROUP": key_group, "VALUES": values, "VALUE_GROUP": value_group}
    constants = {**shape, **codecs, "NORM": "centred", "ROTATED": form.rotated, "PDL": capability >= 90}
    compiled = ahead_of_time(kernels.store, constants, pointers, capability, warps=1, enable_fp_fusion=False)
    used = usage(compiled)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["REG"] <= 96
    assert "fma.rn.f32" not in compiled.asm["ptx"]


def test_what_does_not_fit_is_refused() -> None:
    rows = stored_rows(3, 2, 1, 64, 32, torch.float32, "centred")
    assert rows.norm is not None
    pages = rows.blank("rk4v4")

    def refused(match: str, rows: StoredRows, pages: Pages = pages) -> None:
        with pytest.raises(ValueError, match=match):
            rows.store(pages)

    refused("float16", replace(rows, v=rows.v.half()))
    refused("float16", replace(rows, norm=HeadNorm("plain", rows.norm.q_weight.half(), rows.norm.k_weight, 1e-6)))
    refused("v ", replace(rows, v=rows.v[:2]))
    refused("32 dims as rk4v4", replace(rows, q=rows.q[..., :32], k=rows.k[..., :32], v=rows.v[..., :32]))
    refused("cos", replace(rows, cos=rows.cos[:2]))
    refused("int32", replace(rows, pages=rows.pages.int()))
    refused("offsets", replace(rows, offsets=rows.offsets[1:]))
    refused("contiguous", replace(rows, sin=rows.sin.t().contiguous().t()))
    refused("follow each other", replace(rows, q=rows.q.transpose(1, 2).contiguous().transpose(1, 2)))
    refused("2, 32", rows, stored_rows(3, 2, 2, 64, 32, torch.float32, None).blank("rk4v4"))
    moved = torch.zeros(2, pages.pool.shape[1] + 2, dtype=torch.uint8)[:, 2:]
    refused("aligned", rows, replace(pages, pool=moved))
    with pytest.raises(ValueError, match="no kernel"):
        scheme(E8Rows(4, 32), 64)


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@gpu
@needs_gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "turning"), [(24, 4, 256, 64), (4, 2, 64, 64)])
def test_on_a_gpu(format: KvFormat, heads: int, kv_heads: int, dim: int, turning: int) -> None:
    """The 27B and the tests' small model."""
    for tokens, norm in ((1, "centred"), (65, "centred"), (513, "plain")):
        rows = stored_rows(tokens, heads, kv_heads, dim, turning, torch.bfloat16, norm, "cuda", seed=tokens)
        q, k = rows.stored_plain(2e-2)
        assert (q == rows.turned()[0]).float().mean() > 0.99
        for pdl in (False, torch.cuda.get_device_capability() >= (9, 0)):
            pages = rows.blank(format)
            assert torch.equal(rows.store(pages, pdl), q)
            rows.assert_stored(pages, format, k)


@gpu
@needs_gpu
@pytest.mark.parametrize("format", FORMATS)
def test_extremes_on_a_gpu(format: KvFormat) -> None:
    rows = extreme_rows(256, format.startswith("r"), "cuda")
    pages = rows.blank(format)
    rows.store(pages)
    rows.assert_stored(pages, format, rows.turned()[1])


@gpu
@needs_gpu
def test_pages_behind_two_gigabytes() -> None:
    rows = stored_rows(8, 4, 2, 64, 64, torch.bfloat16, None, "cuda")
    near = rows.blank("int8")
    rows.store(near)
    behind = 2**31 // near.pool.shape[1] + 1
    far = replace(near, pool=torch.empty(behind + 2, near.pool.shape[1], dtype=torch.uint8, device="cuda"))
    far.pool[behind:] = rows.blank("int8").pool
    replace(rows, pages=torch.where(rows.pages < 0, -1, rows.pages + behind)).store(far)
    assert torch.equal(far.pool[behind:], near.pool)


@gpu
@needs_gpu
def test_one_captured_launch_serves_other_places() -> None:
    """Those of the padding are nobody's."""
    rows = stored_rows(8, 24, 4, 256, 64, torch.bfloat16, "centred", "cuda")
    rows = replace(rows, pages=rows.pages.clamp(min=0), offsets=torch.randperm(64, device="cuda")[:8])
    q, k = rows.stored_plain(2e-2)
    pages, everybody, out = rows.blank("rk4v4"), rows.pages.clone(), torch.empty_like(q)

    def run() -> None:
        store(pages.kv, rows.q, rows.k, rows.v, rows.norm, rows.cos, rows.sin, rows.pages, rows.offsets, out)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for count, moved in ((8, 1), (3, 5), (0, 9)):
        rows.offsets.add_(moved).remainder_(64)
        rows.pages.copy_(torch.where(torch.arange(8, device="cuda") < count, everybody, -1))
        pages.pool.copy_(rows.blank("rk4v4").pool)
        out.zero_()
        graph.replay()
        assert torch.equal(out, q)
        rows.assert_stored(pages, "rk4v4", k)
