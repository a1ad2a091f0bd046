"""Paged attention on a GPU: the share of copy bandwidth of decode and verify, of the matrix rate of prefill.

Random K and V, plain bfloat16 or coded, pages in random order, in a block-major pool of as many layers as it takes to
outgrow the L2. The limit of decode and verify is what must be read: K and V, or their codes and scales. Beside plain
ones torch's FlashAttention on K and V that were gathered before (the gathering is not counted).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.linear import copy_bandwidth, matrix_rates, replayed
from bench.results import Entry, write_entries
from kernels.attention.batch import PagedBatch
from kernels.attention.decode import decode, decode_workspace
from kernels.attention.launch import DecodeLaunch, PrefillLaunch, decode_launch, prefill_launch
from kernels.attention.prefill import prefill
from kernels.attention.segments import Segments
from kernels.attention.shapes import code_bits
from kernels.kv_codec import KvForm, KvFormat, LayerKv, kv_form, layer_views, write

PAGE = 64
HEADS = {"27B": (24, 4), "35B-A3B": (16, 2)}
DIM = 256
CODED: list[KvFormat] = [name for name in get_args(KvFormat) if name not in ("auto", "bf16")]
_SCALE = DIM**-0.5
_DRAWN = 64
"""Pages that are drawn and encoded; the pool repeats them."""
_L2_TIMES = 3
_LAUNCHES = 24
"""In a graph at least, so that its own start does not count."""


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    batch: int
    rows: int
    depth: int
    """Tokens that the last row sees."""
    format: KvFormat = "auto"

    @property
    def form(self) -> KvForm:
        return kv_form(self.format, torch.bfloat16)

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.depth * HEADS[self.model][1] * self.form.row_bytes(DIM)

    @property
    def operations(self) -> int:
        past = self.depth - self.rows
        seen = self.rows * past + self.rows * (self.rows + 1) // 2
        return 4 * self.batch * HEADS[self.model][0] * DIM * seen


DECODE = [
    *(Case("27B", batch, 1, depth) for depth in (1024, 8192, 98304) for batch in (1, 8)),
    *(Case("27B", 1, rows, depth) for depth in (1024, 98304) for rows in (4, 8, 16)),
    Case("27B", 8, 4, 8192),
    Case("27B", 1, 1, 262144),
    Case("35B-A3B", 1, 1, 98304),
    *(Case("27B", 1, 1, 98304, name) for name in CODED),
    *(Case("27B", batch, rows, 8192, name) for batch, rows in ((8, 1), (1, 4)) for name in ("fp8", "rk4v4-e8")),
    *(Case("27B", 1, 8, 98304, name) for name in ("fp8", "rk4v4-e8")),
]
PREFILL = [
    Case("27B", 1, 2048, 2048),
    Case("27B", 1, 8192, 8192),
    Case("27B", 4, 512, 8192),
    Case("27B", 1, 2048, 98304),
    Case("35B-A3B", 1, 8192, 8192),
    *(Case("27B", 1, 8192, 8192, name) for name in ("fp8", "int8", "rk4v4-e8")),
    *(Case("27B", 1, 2048, 98304, name) for name in ("fp8", "rk4v4-e8")),
]


@dataclass(frozen=True, slots=True)
class Data:
    q: Tensor
    """[batch * rows, heads, DIM]"""
    layers: list[LayerKv]
    batch: PagedBatch
    out: Tensor


def data_of(case: Case) -> Data:
    heads, kv_heads = HEADS[case.model]
    layers = max(2, _L2_TIMES * torch.cuda.get_device_properties(0).L2_cache_size // case.kv_bytes + 1)
    pages = -(-case.depth // PAGE)
    layer_bytes = PAGE * kv_heads * case.form.row_bytes(DIM)
    drawn = torch.empty(_DRAWN, layer_bytes, dtype=torch.uint8, device="cuda")
    token = torch.arange(_DRAWN * PAGE, device="cuda")
    k, v = torch.randn(2, len(token), kv_heads, DIM, device="cuda").to(torch.bfloat16)
    write(layer_views(drawn, case.form, PAGE, kv_heads, DIM)[0], k, v, token // PAGE, token % PAGE)
    pool = torch.empty(case.batch * pages, layers * layer_bytes, dtype=torch.uint8, device="cuda")
    for layer in range(layers):
        held = torch.arange(layer, layer + len(pool), device="cuda") % _DRAWN
        pool[:, layer * layer_bytes : (layer + 1) * layer_bytes] = drawn[held]
    tables = torch.randperm(case.batch * pages).view(case.batch, pages).tolist()
    q = torch.randn(case.batch * case.rows, heads, DIM, device="cuda").to(torch.bfloat16)
    counts, contexts = [case.rows] * case.batch, [case.depth] * case.batch
    batch = PagedBatch.of(counts, contexts, tables, torch.device("cuda"))
    return Data(q, layer_views(pool, case.form, PAGE, kv_heads, DIM), batch, torch.empty_like(q))


def time_decode(case: Case, data: Data, launch: DecodeLaunch) -> float:
    """Seconds a layer."""
    workspace = decode_workspace(len(data.q), data.q.shape[1], DIM, launch.splits, data.q.device)

    def of_layer(layer: int) -> None:
        decode(data.q, data.layers[layer], data.batch, _SCALE, launch, workspace, data.out, case.rows, case.depth)

    return _layer_time(of_layer, len(data.layers))


def time_prefill(case: Case, data: Data, launch: PrefillLaunch) -> float:
    """Seconds a layer; of coded K and V with their decoding."""
    coded = code_bits(case.form) is not None
    segments = Segments.of(data.q, data.layers[0], case.batch, case.depth, launch) if coded else None

    def of_layer(layer: int) -> None:
        prefill(data.q, data.layers[layer], data.batch, _SCALE, launch, data.out, case.rows, segments)

    return _layer_time(of_layer, len(data.layers), 1)


def time_flash(case: Case, data: Data) -> float:
    """Seconds of torch's FlashAttention. Where no row may look at another (a decode step), the query heads that share
    a K/V head take the place of rows; otherwise each has a copy of K and V, which were made before."""
    heads, kv_heads = HEADS[case.model]
    group, pages = heads // kv_heads, data.batch.tables.long()
    copies = 1 if case.rows == 1 else group
    gathered = [
        [
            kept.codes[pages].flatten(1, 2)[:, : case.depth].transpose(1, 2).repeat_interleave(copies, 1)
            for kept in (kv.keys, kv.values)
        ]
        for kv in data.layers
    ]
    rows = data.q.view(case.batch, case.rows, heads, DIM)
    q = rows.view(case.batch, kv_heads, group, DIM) if case.rows == 1 else rows.transpose(1, 2)
    seen: Any = None if case.rows == 1 else causal_lower_right(case.rows, case.depth)

    def of_layer(layer: int) -> None:
        scaled_dot_product_attention(q, *gathered[layer], attn_mask=seen, scale=_SCALE)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _layer_time(of_layer, len(data.layers), 1)


def _layer_time(of_layer: Callable[[int], object], layers: int, least: int = _LAUNCHES) -> float:
    rounds = -(-least // layers)

    def run() -> None:
        for _ in range(rounds):
            for layer in range(layers):
                of_layer(layer)

    return replayed(run, rounds * layers, 20)


def chosen_decode(case: Case) -> DecodeLaunch:
    heads, kv_heads = HEADS[case.model]
    gpu = torch.cuda.get_device_properties(0)
    capability = torch.cuda.get_device_capability()
    processors, bits = gpu.multi_processor_count, code_bits(case.form)
    return decode_launch(case.rows, heads // kv_heads, DIM, 2, kv_heads, processors, capability, bits)


def chosen_prefill(case: Case) -> PrefillLaunch:
    return prefill_launch(DIM, 2, torch.cuda.get_device_capability())


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    device = torch.cuda.get_device_name()
    table = Table("attention", "us", "share of the limit", "FlashAttention, us", title=f"{device}, a layer")
    with torch.inference_mode():
        bandwidth, rate = copy_bandwidth(), matrix_rates()[0]
        entries = [
            Entry("ceiling/copy", round(bandwidth / 1e12, 3), "TB/s"),
            Entry("ceiling/bf16", round(rate / 1e12, 1), "TFLOP/s"),
        ]
        for case in DECODE + PREFILL:
            data = data_of(case)
            if case in DECODE:
                kind = "decode" if case.rows == 1 else "verify"
                seconds, best = time_decode(case, data, chosen_decode(case)), case.kv_bytes / bandwidth
            else:
                kind, best = "prefill", case.operations / rate
                seconds = time_prefill(case, data, chosen_prefill(case))
            name = f"attention/{kind}/{case.model}/depth{case.depth}/batch{case.batch}/rows{case.rows}"
            if case.format != "auto":
                name += f"/{case.format}"
            entries.append(Entry(name, round(seconds * 1e6, 2), "us", round(best / seconds, 3), round(best * 1e6, 2)))
            peer = ""
            # Verify would need a copy of K and V for each query head.
            if kind != "verify" and case.format == "auto":
                try:
                    flash = time_flash(case, data)
                except RuntimeError as error:  # a torch whose FlashAttention does not take this shape
                    peer = str(error).partition("\n")[0]
                else:
                    entries.append(Entry(f"{name}/flash", round(flash * 1e6, 2), "us", round(best / flash, 3)))
                    peer = f"{flash * 1e6:.1f} ({best / flash:.0%})"
            table.add_row(name, f"{seconds * 1e6:.1f}", f"{best / seconds:.0%}", peer)
            del data
            torch.cuda.empty_cache()
    Console(width=130).print(table)
    write_entries(f"attention-{device.split()[-1].lower()}", entries, device)
