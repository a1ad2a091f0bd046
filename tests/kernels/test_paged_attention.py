"""The attention kernels: in the interpreter, compiled for GPUs that are not here, and on a GPU at real shapes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from kernels.attention import coded, expand
from kernels.attention import triton as kernels
from kernels.attention.batch import PagedBatch
from kernels.attention.decode import decode, decode_workspace
from kernels.attention.launch import (
    DecodeLaunch,
    PrefillLaunch,
    decode_launch,
    prefill_launch,
    segment_tokens,
)
from kernels.attention.prefill import prefill
from kernels.attention.segments import Segments
from kernels.attention.shapes import Pool, code_bits, row_codec
from kernels.kv_codec import KvForm, KvFormat, LayerKv, kv_form, layer_views, plain_form, plain_layer
from tests.kernels.compiled import SHARED_LIMIT, resources, run_interpreted
from tests.kernels.paged_sequences import LAYER, POISON, PagedSequences, paged_sequences

PAGE = 64
INTEGERS = dict.fromkeys(("first_ptr", "count_ptr", "context_ptr", "table_ptr"), "*i32")
CAPABILITIES = [80, 89, 90, 120]
ROOM = {80: 163 * 1024, 89: SHARED_LIMIT, 90: 227 * 1024, 120: SHARED_LIMIT}
"""Shared memory of a block."""


CODED: list[KvFormat] = [name for name in get_args(KvFormat) if name not in ("auto", "bf16")]
PLAIN = plain_form(torch.bfloat16)


def test_interpreted() -> None:
    """Lengths about the page and 4097, ragged rows, poisoned pages; see `interpreted_attention`."""
    run_interpreted("tests.kernels.interpreted_attention")


def test_interpreted_coded() -> None:
    """Every format is read as its codec decodes it."""
    run_interpreted("tests.kernels.interpreted_attention", *CODED)


def test_emulated_coded() -> None:
    """Every format with the instructions that a GPU would run."""
    run_interpreted("tests.kernels.emulated_ptx", *CODED)


def codecs_of(form: KvForm, dim: int) -> dict[str, object]:
    keys, key_dims = row_codec(form.keys, dim)
    values, value_dims = row_codec(form.values, dim)
    return {"KEYS": keys, "KEY_DIMS": key_dims, "VALUES": values, "VALUE_DIMS": value_dims}


def pointers_of(form: KvForm, launch: DecodeLaunch | PrefillLaunch, dim: int) -> dict[str, str]:
    """Codes are bytes, scales float16 or bytes; in the kernel all of them are words."""
    plain = f"tensordesc<bf16[{launch.block_n}, {dim}]>" if launch.tma else "*bf16"
    kind = plain if form is PLAIN else "*u8"
    scales = {"key_scales": "*u8", "value_scales": "*u8"}
    return {"q_ptr": "*bf16", "keys": kind, "values": kind, **scales, **INTEGERS, "scale": "fp32"}


def decode_resources(form: KvForm, rows: int, capability: int) -> dict[str, int]:
    """27B."""
    launch = decode_launch(rows, 6, 256, 2, 4, 128, divmod(capability, 10), code_bits(form))
    tile = {"GROUP": 6, "D": 256, "PAGE": PAGE, "BM": launch.block_m, "BN": launch.block_n, "STAGES": launch.stages}
    constants = {**tile, "LEAST": launch.least_pages, "PDL": launch.pdl}
    pointers = {**pointers_of(form, launch, 256), "partial_ptr": "*fp32", "weight_ptr": "*fp32"}
    if form is PLAIN:
        constants |= {"WIDE": False, "TMA": launch.tma}
        return resources(kernels.decode, constants, pointers, capability, launch.warps)
    constants |= {"SLICES": launch.slices, "ASM": True, "CVT": launch.converts, "ROTATED": form.rotated}
    return resources(coded.decode, {**constants, **codecs_of(form, 256)}, pointers, capability, launch.warps)


@pytest.mark.parametrize(("rows", "capability"), [*((1, capability) for capability in CAPABILITIES), (8, 90), (8, 120)])
def test_decode_compiled_ahead_of_time(rows: int, capability: int) -> None:
    """27B: no registers are spilled, and shared memory suffices."""
    used = decode_resources(PLAIN, rows, capability)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["SHARED"] <= ROOM[capability]


@pytest.mark.parametrize(
    ("name", "rows", "capability"),
    [("fp8", 1, 80), ("fp8", 1, 89), ("int8", 1, 120), ("rk4v4-e8", 1, 90), ("fp8", 8, 90), ("int8", 8, 120)],
)
def test_coded_decode_compiled_ahead_of_time(name: KvFormat, rows: int, capability: int) -> None:
    used = decode_resources(kv_form(name, torch.bfloat16), rows, capability)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["SHARED"] <= ROOM[capability]


@pytest.mark.parametrize(
    ("capability", "carried"), [*((capability, False) for capability in CAPABILITIES), (90, True), (120, True)]
)
def test_prefill_compiled_ahead_of_time(capability: int, carried: bool) -> None:
    """27B: of the pool's pages, and of a segment's whose queries go on."""
    launch = prefill_launch(256, 2, divmod(capability, 10))
    tile = {"GROUP": 6, "D": 256, "PAGE": PAGE, "BM": launch.block_m, "BN": launch.block_n, "STAGES": launch.stages}
    constants = {
        **tile,
        "WIDE": False,
        "TMA": launch.tma,
        "EARLY": launch.early,
        "PAGED": not carried,
        "CARRIED": carried,
    }
    pointers = {**pointers_of(PLAIN, launch, 256), "out_ptr": "*bf16"}
    pointers |= dict.fromkeys(("acc_ptr", "peak_ptr", "total_ptr"), "*fp32")
    used = resources(kernels.prefill, constants, pointers, capability, launch.warps)
    # The addresses of the output and of what is carried, which wait in the stack while the loop runs.
    assert used["STACK"] <= (320 if carried else 128)
    assert used["SHARED"] <= ROOM[capability]


@pytest.mark.parametrize(
    ("name", "capability"), [("fp8", 80), ("nvfp4", 89), ("int8", 120), ("rk8v4", 90), ("rk2v4-e8", 120)]
)
def test_expand_compiled_ahead_of_time(name: KvFormat, capability: int) -> None:
    form = kv_form(name, torch.bfloat16)
    constants = {"D": 256, "PAGE": PAGE, "BN": 32, **codecs_of(form, 256), "ROTATED": form.rotated}
    plain = dict.fromkeys(("plain_keys", "plain_values"), "*bf16")
    pointers = {**dict.fromkeys(("keys", "key_scales", "values", "value_scales"), "*u8"), **plain, **INTEGERS}
    used = resources(expand.expand, constants, pointers, capability, 4)
    assert used["STACK"] <= 32
    assert used["SHARED"] <= 24 * 1024  # four programs a multiprocessor


def test_combine_compiled_ahead_of_time() -> None:
    constants = {"D": 256, "BD": 64, "PAGE": PAGE, "LEAST": 1, "MOST": 64, "CHUNK": 64, "ROTATED": True, "PDL": True}
    pointers = {**INTEGERS, "partial_ptr": "*fp32", "weight_ptr": "*fp32", "out_ptr": "*bf16"}
    assert resources(kernels.combine, constants, pointers, 90, 4)["STACK"] == 0


def test_launches() -> None:
    for rows, capability in ((1, (9, 0)), (4, (9, 0)), (16, (12, 0)), (16, (8, 9))):
        launch = decode_launch(rows, 6, 256, 2, 4, 132, capability)
        assert launch.splits == decode_launch(1, 6, 256, 2, 4, 132, capability).splits == 64
        assert PAGE % launch.block_n == 0
        assert launch.block_m >= min(64, 6 * rows)
        assert launch.tma is launch.pdl is (capability == (9, 0)) or capability == (12, 0)
    assert decode_launch(1, 8, 256, 2, 2, 132, (9, 0)).splits == 128
    assert decode_launch(16, 2, 64, 4, 2, 28, (8, 6)).block_m == 16
    for name in CODED:
        bits = code_bits(kv_form(name, torch.bfloat16))
        launch = decode_launch(16, 6, 256, 2, 4, 132, (9, 0), bits)
        assert (launch.splits, launch.block_m, launch.tma, launch.converts) == (64, 8, False, True)
        assert PAGE % (launch.block_n * launch.slices) == 0


def test_segments_are_bounded() -> None:
    """27B: 4 KiB a token."""
    assert segment_tokens(1, 8192, 4096, PAGE) == 8192
    assert segment_tokens(1, 16383, 4096, PAGE) == segment_tokens(1, 262144, 4096, PAGE) == 16384
    assert segment_tokens(3, 262144, 4096, PAGE) == 5440
    assert segment_tokens(1000, 262144, 4096, PAGE) == PAGE
    case = paged_sequences((17, 0), (130, 7), 4, 2, 64, torch.float32, form=kv_form("rk4v4", torch.float32))
    launch = PrefillLaunch(16, 16, 4, 2, scratch=2 * 128 * 1024)
    for longest, count in ((128, 1), (130, 2)):
        segments = Segments.of(case.q, case.kv, 2, longest, launch)
        assert (segments.tokens, segments.count) == (128, count)
        kept = 0 if segments.carry is None else sum(tensor.nbytes for tensor in segments.carry.all)
        assert kept == (0 if count == 1 else len(case.q) * 4 * 4 * (64 + 2))
        assert segments.plain.keys.codes.nbytes + segments.plain.values.codes.nbytes == launch.scratch
    with pytest.raises(ValueError, match="rk4v4: no segments"):
        prefill(case.q, case.kv, case.batch, 1.0, launch, torch.empty_like(case.q), 17)
    few = Segments.of(case.q, case.kv, 1, 130, launch)
    with pytest.raises(ValueError, match="rk4v4: no segments"):
        prefill(case.q, case.kv, case.batch, 1.0, launch, torch.empty_like(case.q), 17, few)


def test_descriptors_only_where_they_can_be() -> None:
    pool = torch.empty(4, 3, 2, 16, 2, 32, dtype=torch.bfloat16)
    keys, values = pool[:, 1, 0], pool[:, 1, 1]

    def of(keys: Tensor, values: Tensor, tma: bool = True) -> Pool:
        return Pool.of(plain_layer(keys, values), 16, tma)

    described = of(keys, values)
    assert (described.described, described.page_stride) == (True, 3 * 2 * 16)
    assert described.keys.shape == [3 * 96 + 16, 64]
    assert of(keys, values, tma=False).page_stride == pool.stride(0)
    assert not of(keys[:, :, :, ::2], values[:, :, :, ::2]).described
    by_head = torch.empty(2, 4, 2, 16, 32, dtype=torch.bfloat16).transpose(2, 3)
    assert not of(by_head[0], by_head[1]).described
    form = kv_form("int8", torch.bfloat16)
    coded = Pool.of(layer_views(torch.empty(4, 3 * 16 * 2 * 2 * 66, dtype=torch.uint8), form, 16, 2, 64)[1], 16, True)
    assert (coded.described, coded.page_stride) == (False, 3 * 16 * 66)


def test_what_does_not_fit_is_refused() -> None:
    case = paged_sequences((1,), (5,), 4, 2, 16, torch.float32)
    keys, values = case.kv.keys.codes, case.kv.values.codes
    launch, out = DecodeLaunch(16, 32, 4, 2, 4), torch.empty_like(case.q)
    workspace = decode_workspace(len(case.q), 4, 16, 4, out.device)

    def run(q: Tensor, kv: LayerKv, space: Tensor = workspace, launch: DecodeLaunch = launch) -> None:
        decode(q, kv, case.batch, case.scale, launch, space, out, 1, 5)

    with pytest.raises(ValueError, match=r"torch\.float16"):
        run(case.q, plain_layer(keys.half(), values.half()))
    with pytest.raises(ValueError, match="heads x 16"):
        run(case.q, case.kv, launch=replace(launch, block_n=128))
    with pytest.raises(ValueError, match="of V "):
        run(case.q, plain_layer(keys, values.contiguous()))
    with pytest.raises(ValueError, match="workspace"):
        run(case.q, case.kv, workspace[1:])
    with pytest.raises(ValueError, match="of strides"):
        run(case.q.transpose(1, 2).contiguous().transpose(1, 2), case.kv)
    with pytest.raises(ValueError, match="queries of contexts"):
        PagedBatch.of((3,), (2,), ((0,),), out.device)
    packed = paged_sequences((1,), (5,), 4, 2, 64, torch.float32, form=kv_form("rk4v4", torch.float32))
    spread = replace(packed.kv.keys, codes=packed.kv.keys.codes.contiguous())
    with pytest.raises(ValueError, match=r"rk4v4: torch\.uint8"):
        decode(packed.q, replace(packed.kv, keys=spread), packed.batch, 1.0, launch, workspace, packed.q, 1, 5)
    with pytest.raises(ValueError, match="heads of 16"):
        run(case.q, packed.kv)


ODD = (1, 63, 64, 65, 4097)
MODELS = [(24, 4, 256), (16, 2, 256), (4, 2, 64)]
"""27B, 35B-A3B and the tests' small model: query heads, K/V heads, head_dim."""
ERRORS = {torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float32: 1e-5}
"""Of the rounding of weights and outputs, relative to the whole."""
CODED_TIMES = 2
"""As much where scales, decoded K and V, and rotated queries and outputs are rounded as well."""


def chosen_launches(rows: int, case: PagedSequences) -> list[DecodeLaunch]:
    """The chosen one, and one without bulk copies."""
    gpu, itemsize = torch.cuda.get_device_properties(0), case.q.element_size()
    heads, dim = case.q.shape[1:]
    kv_heads = case.kv.keys.codes.shape[2]
    capability = torch.cuda.get_device_capability()
    chosen = decode_launch(
        rows, heads // kv_heads, dim, itemsize, kv_heads, gpu.multi_processor_count, capability, code_bits(case.kv.form)
    )
    return [chosen, replace(chosen, tma=False, stages=2)] if chosen.tma else [chosen]


def decoded(case: PagedSequences, launch: DecodeLaunch, rows: int, longest: int) -> Tensor:
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype, device="cuda")
    heads, dim = case.q.shape[1:]
    workspace = decode_workspace(len(case.q), heads, dim, launch.splits, out.device).fill_(torch.nan)
    decode(case.q, case.kv, case.batch, case.scale, launch, workspace, out, rows, longest)
    return out


def prefilled(case: PagedSequences, launch: PrefillLaunch) -> Tensor:
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype, device="cuda")
    rows, longest = max(case.counts), max(case.contexts)
    segments = None
    if code_bits(case.kv.form) is not None:
        segments = Segments.of(case.q, case.kv, len(case.counts), longest, launch)
        for tensor in (segments.plain.keys.codes, segments.plain.values.codes):
            tensor.fill_(torch.nan)
        for tensor in segments.carry.all if segments.carry else ():
            tensor.fill_(torch.nan)
    prefill(case.q, case.kv, case.batch, case.scale, launch, out, rows, segments)
    return out


def assert_near(out: Tensor, case: PagedSequences) -> None:
    """Row by row; NaN fails."""
    assert out[-1].isnan().all()
    expected = case.expected()[:-1].flatten(1)
    error = (out[:-1].double().flatten(1) - expected).norm(dim=1) / expected.norm(dim=1)
    bound = ERRORS[out.dtype] * (1 if code_bits(case.kv.form) is None else CODED_TIMES)
    assert float(error.max()) < bound, (case.kv.form.name, error.max())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGpu:
    """Against float64; what does not belong to a sequence is NaN."""

    @pytest.mark.parametrize("dtype", ERRORS)
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize("rows", [1, 4, 8, 16])
    def test_decode_and_verify(self, rows: int, model: tuple[int, int, int], dtype: torch.dtype) -> None:
        counts = [min(1 + place % rows if place else rows, context) for place, context in enumerate(ODD[::-1])]
        case = paged_sequences((*counts, 0), (*ODD[::-1], 7), *model, dtype, "cuda", seed=rows)
        for launch in chosen_launches(rows, case):
            out = decoded(case, launch, rows, 4097)
            assert_near(out, case)
            assert torch.equal(decoded(case, launch, rows, 100_000)[:-1], out[:-1])

    @pytest.mark.parametrize("dtype", ERRORS)
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize("counts", [ODD, (300, 0, 5, 65, 1000)])
    def test_prefill(self, counts: Sequence[int], model: tuple[int, int, int], dtype: torch.dtype) -> None:
        contexts = counts if counts == ODD else (300, 9, 4097, 1000, 1063)
        case = paged_sequences(counts, contexts, *model, dtype, "cuda")
        chosen = prefill_launch(model[2], case.q.element_size(), torch.cuda.get_device_capability())
        for launch in (chosen, replace(chosen, tma=False)):
            assert_near(prefilled(case, launch), case)

    @pytest.mark.parametrize("dtype", ERRORS)
    @pytest.mark.parametrize("model", [MODELS[0], MODELS[2]])
    @pytest.mark.parametrize("name", CODED)
    def test_coded(self, name: KvFormat, model: tuple[int, int, int], dtype: torch.dtype) -> None:
        form = kv_form(name, dtype)
        for rows in (1, 4, 16):
            counts = [min(rows, context) for context in ODD]
            case = paged_sequences((*counts, 0), (*ODD, 7), *model, dtype, "cuda", seed=rows, form=form)
            assert_near(decoded(case, chosen_launches(rows, case)[0], rows, 4097), case)
        case = paged_sequences((300, 0, 5, 65), (300, 9, 4097, 1000), *model, dtype, "cuda", form=form)
        launch = prefill_launch(model[2], case.q.element_size(), torch.cuda.get_device_capability())
        whole = prefilled(case, launch)
        assert_near(whole, case)
        assert torch.equal(prefilled(case, replace(launch, scratch=2**20))[:-1], whole[:-1])

    @pytest.mark.parametrize("name", CODED)
    def test_expand(self, name: KvFormat) -> None:
        """Every code of two segments is what the codec decodes, turned back."""
        form = kv_form(name, torch.float32)
        case = paged_sequences((17, 0, 5), (250, 9, 66), 24, 4, 256, torch.float32, "cuda", form=form)
        launch = prefill_launch(256, 4, torch.cuda.get_device_capability())
        segments = Segments.of(case.q, case.kv, 3, 250, replace(launch, scratch=3 * 2**20))
        assert (segments.tokens, segments.count) == (128, 2)
        read = [(case.kv.keys, segments.plain.keys.codes), (case.kv.values, segments.plain.values.codes)]
        for segment, (rows, plain) in product(range(2), read):
            segments.fill(case.kv, case.batch, segment)
            for sequence, (context, table) in enumerate(zip(case.contexts, case.tables, strict=True)):
                held = max(0, min(128, context - 128 * segment)) if case.counts[sequence] else 0
                expected = case.read(rows, table)[128 * segment :][:held].float()
                mine = plain[2 * sequence : 2 * sequence + 2].flatten(0, 1)[:held]
                torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("name", ["auto", "fp8", "rk8v4", "rk4v4-e8"])
    def test_prefill_in_segments(self, name: KvFormat) -> None:
        """27B: chunks behind 20,000 tokens and less, in two segments of the chosen size and in many small ones."""
        form = kv_form(name, torch.bfloat16)
        case = paged_sequences((300, 1, 100), (20300, 65, 8000), 24, 4, 256, torch.bfloat16, "cuda", form=form)
        launch = prefill_launch(256, 2, torch.cuda.get_device_capability())
        whole = prefilled(case, launch)
        assert_near(whole, case)
        for scratch in (2**32, 2**23):
            assert torch.equal(prefilled(case, replace(launch, scratch=scratch))[:-1], whole[:-1])

    @pytest.mark.parametrize("name", ["auto", "fp8", "rk4v4-e8"])
    def test_deep(self, name: KvFormat) -> None:
        """At 98,304 tokens, beside short ones; alone, the same bits."""
        form = kv_form(name, torch.bfloat16)
        case = paged_sequences((4, 1, 1), (98304, 640, 98303), 24, 4, 256, torch.bfloat16, "cuda", form=form)
        launch = chosen_launches(4, case)[0]
        out = decoded(case, launch, 4, 98304)
        assert_near(out, case)
        batch = PagedBatch.of((1,), (98303,), case.tables[2:], torch.device("cuda"))
        alone = replace(case, q=case.q[5:], batch=batch, counts=(1,), contexts=(98303,), tables=case.tables[2:])
        assert torch.equal(decoded(alone, launch, 4, 98303)[0], out[5])

    @pytest.mark.parametrize("name", ["auto", "fp8", "rk4v4-e8"])
    def test_graph(self, name: KvFormat) -> None:
        """One capture serves every batch of its bucket."""
        form = kv_form(name, torch.bfloat16)
        cases = [
            paged_sequences(counts, contexts, 24, 4, 256, torch.bfloat16, "cuda", seed=len(contexts), form=form)
            for counts, contexts in (((4, 1, 2), (4097, 64, 63)), ((1, 4, 1, 1), (1, 130, 2000, 4096)))
        ]
        pages = max(len(case.pool) for case in cases)
        pool = torch.empty(pages, cases[0].pool.shape[1], dtype=torch.uint8, device="cuda")
        kv = layer_views(pool, cases[0].kv.form, PAGE, 4, 256)[LAYER]
        q = torch.zeros(17, 24, 256, dtype=torch.bfloat16, device="cuda")
        out = torch.empty_like(q)
        zeros = torch.zeros(4, 100, dtype=torch.int32, device="cuda")
        batch = PagedBatch(zeros[:, 0].contiguous(), zeros[:, 1].contiguous(), zeros[:, 2].contiguous(), zeros)
        launch = chosen_launches(4, cases[0])[0]
        workspace = decode_workspace(len(q), 24, 256, launch.splits, q.device)

        def run() -> None:
            decode(q, kv, batch, cases[0].scale, launch, workspace, out, 4, 4160)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for case in cases:
            pool.fill_(POISON)[: len(case.pool)] = case.pool
            q[: len(case.q)] = case.q
            out.fill_(torch.nan)
            for mine, theirs in ((batch.first, case.batch.first), (batch.counts, case.batch.counts),
                                 (batch.contexts, case.batch.contexts)):  # fmt: skip
                mine.zero_()[: len(theirs)] = theirs
            batch.tables[: len(case.tables), : case.batch.tables.shape[1]] = case.batch.tables
            graph.replay()
            eager = decoded(case, launch, 4, 4160)
            assert torch.equal(out[: len(case.q) - 1], eager[:-1])
            assert out[len(case.q) - 1 :].isnan().all()
            assert_near(eager, case)
