"""Products with packed weights on a GPU: the share of copy bandwidth of few rows, of the matrix rate of many.

Weights are random, at the 27B's shapes. A graph runs over copies of the matrix that are larger than the L2 together; a
number is the median of its replays, divided by the products in it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from bench.results import Entry, write_entries
from kernels.linear import linear
from kernels.linear.packing import FP8, unit_columns
from kernels.linear.quantized import FORMATS
from kernels.linear.weight import Weight

SHAPES = {
    "gate+up": (34816, 5120),
    "down": (5120, 17408),
    "attention in": (14336, 5120),
    "GDN in": (16384, 5120),
    "out": (5120, 6144),
    "head": (248320, 5120),
}
MAIN = ("nvfp4", "fp8", "int4-g64", "int3-g128")
FEW = (1, 4, 8, 16, 64)
MANY = (2048,)
REPLAYS = 50
_L2_TIMES = 3
_COPY_SECONDS = 0.5
_LAUNCHES = 24
"""Products in a graph at least, so that its own start does not count."""
_BITS = {"int8-g32": 2, "int6-g64": 3, "int5-g64": 5, "int4-g64": 2, "int3-g128": 3, "nvfp4": 1}
"""Planes of a unit."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    copy: float
    """Bytes read and written a second."""
    bf16: float
    """FLOP/s."""
    fp8: float


def random_weight(format: str, rows: int, columns: int, device: torch.device | str = "cuda") -> Weight:
    """Any bits are codes; columns are a multiple of the unit."""
    if format in FP8:
        codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, device=device)
        if format == "fp8":
            return Weight(format, rows, columns, codes, None, torch.rand(rows, device=device))
        return Weight(format, rows, columns, codes, torch.rand(-(-rows // 128), columns // 128, device=device))
    unit = unit_columns(format)
    codes = torch.randint(-(2**31), 2**31, (columns // unit, _BITS[format], rows, 8), dtype=torch.int32, device=device)
    if format == "nvfp4":
        scales = torch.randint(50, 120, (columns // unit, rows, 4), dtype=torch.uint8, device=device)
        scales = ((scales & 15) << 4) | (scales >> 4)  # as `packing` has them
        return Weight(
            format, rows, columns, codes, scales.view(torch.int32)[..., 0].contiguous(), torch.rand(rows, device=device)
        )
    scales = torch.rand(columns // FORMATS[format].group // 2, rows, 2, device=device).to(torch.bfloat16)
    return Weight(format, rows, columns, codes, scales)


def replayed(run: Callable[[], object], products: int, replays: int = REPLAYS) -> float:
    """Seconds a product: the median of a graph's replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times) / products


def copy_bandwidth() -> float:
    """Not of a graph: copies in one were measured at 2.7 TB/s where another program, without one, measured 4.2."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    begin = time.monotonic()
    while time.monotonic() < begin + _COPY_SECONDS:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / median(times)


def matrix_rates() -> tuple[float, float]:
    """bf16 and fp8, FLOP/s of square products."""
    size = 8192
    x, w = torch.randn(2, size, size, device="cuda").to(torch.bfloat16)
    one = torch.ones((), device="cuda")
    codes, columns = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()

    def fp8() -> None:
        torch._scaled_mm(codes, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    work = 2 * size**3
    return work / replayed(lambda: torch.mm(x, w), 1, 20), work / replayed(fp8, 1, 20)


def measure(format: str, rows: int, columns: int, counts: tuple[int, ...], top: Ceilings) -> list[Entry]:
    first = random_weight(format, rows, columns)
    copies = max(2, _L2_TIMES * torch.cuda.get_device_properties(0).L2_cache_size // first.nbytes + 1)
    weights = [first, *(random_weight(format, rows, columns) for _ in range(copies - 1))]
    entries = []
    for count in counts:
        x = torch.randn(count, columns, device="cuda").to(torch.bfloat16)
        rounds = max(1, _LAUNCHES // copies) if count in FEW else 1

        def run(x: torch.Tensor = x, rounds: int = rounds) -> None:
            for _ in range(rounds):
                for weight in weights:
                    linear(x, weight)

        seconds = replayed(run, rounds * copies, REPLAYS if count in FEW else 12)
        if count in FEW:
            best = first.nbytes / top.copy
        else:
            best = 2 * count * rows * columns / (top.fp8 if format == "fp8" else top.bf16)
        name = f"linear/{format}/{rows}x{columns}/m{count}"
        entries.append(Entry(name, round(seconds * 1e6, 2), "us", round(best / seconds, 3), round(best * 1e6, 2)))
    return entries


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    device = torch.cuda.get_device_name()
    with torch.inference_mode():
        top = Ceilings(copy_bandwidth(), *matrix_rates())
        entries = [
            Entry("ceiling/copy", round(top.copy / 1e12, 3), "TB/s"),
            Entry("ceiling/bf16", round(top.bf16 / 1e12, 1), "TFLOP/s"),
            Entry("ceiling/fp8", round(top.fp8 / 1e12, 1), "TFLOP/s"),
        ]
        for format in MAIN:
            for rows, columns in SHAPES.values():
                entries += measure(format, rows, columns, FEW if rows > 100_000 else FEW + MANY, top)
        for format in FORMATS.keys() - MAIN:
            entries += measure(format, 16384, 5120, (1, 8, *MANY), top)
    table = Table(
        "weight",
        "us",
        "at the limit, us",
        "share of the limit",
        title=f"{device}: limit is copy bandwidth up to 64 rows, else the matrix rate",
    )
    for entry in entries:
        share = "" if entry.ratio is None else f"{entry.ratio:.0%}"
        table.add_row(
            entry.name, f"{entry.value:g} {entry.unit}", "" if entry.limit is None else f"{entry.limit:g}", share
        )
    Console(width=110).print(table)
    write_entries(f"linear-{device.split()[-1].lower()}", entries, device)
