"""`python -m bench.attention_launches`: launches that `kernels/attention/launch.py` could choose, the fastest first.

With `coded`: only those of decode over coded pages, which take most of their time to compile. With `prefill`: only the
few of prefill that could matter on Hopper.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from triton.runtime.errors import OutOfResources

from bench.attention import Case, Data, chosen_decode, chosen_prefill, data_of, time_decode, time_prefill
from bench.linear import copy_bandwidth, matrix_rates
from kernels.attention.launch import DecodeLaunch, PrefillLaunch
from kernels.kv_codec import KvFormat

L = TypeVar("L", DecodeLaunch, PrefillLaunch)

DECODE = [Case("27B", 1, 1, 98304), Case("27B", 1, 1, 1024), Case("27B", 1, 4, 98304), Case("27B", 1, 8, 98304)]
_CODED: tuple[tuple[KvFormat, int], ...] = (
    *(("fp8", 1), ("int8", 1), ("rk4v4", 1), ("rk4v4-e8", 1)),
    *(("fp8", 4), ("rk4v4-e8", 4), ("fp8", 8)),
)
CODED = [Case("27B", 1, rows, 98304, name) for name, rows in _CODED]
PREFILL = [Case("27B", 1, 8192, 8192), Case("27B", 1, 2048, 98304), Case("27B", 1, 2048, 98304, "fp8")]
_TILES = [(16, 4, 5), (32, 4, 2), (32, 4, 3), (32, 4, 4), (32, 8, 3), (64, 4, 2), (64, 8, 2), (64, 8, 3)]
"""Tokens a round, warps, stages."""
_PREFILL = [(128, 64, 8, 2), (128, 64, 8, 1), (128, 32, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2), (64, 64, 4, 1),
            (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)]  # fmt: skip
_FEW = [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 32, 4, 2)]
"""With V asked for early; the last is two programs a multiprocessor."""


def decode_launches(case: Case) -> list[DecodeLaunch]:
    chosen = chosen_decode(case)
    others = [chosen.block_m // 2] if chosen.block_m > 16 else []
    return [
        replace(chosen, block_m=block_m, block_n=block_n, warps=warps, stages=stages, tma=tma)
        for block_m, (block_n, warps, stages), tma in product([chosen.block_m, *others], _TILES, (False, True))
    ]


def coded_launches(case: Case) -> list[DecodeLaunch]:
    """Of a warp a slice: fewer copies under way, and shorter rounds of more programs."""
    chosen = chosen_decode(case)
    return [
        chosen,
        replace(chosen, stages=chosen.stages - 1),
        replace(chosen, warps=2, slices=2, splits=2 * chosen.splits),
        *([replace(chosen, block_m=8)] if chosen.block_m > 8 else []),
    ]


def split_launches(chosen: DecodeLaunch) -> list[DecodeLaunch]:
    """Of the best tiles: how the context is split, and whether kernels overlap."""
    return [
        replace(chosen, splits=splits, least_pages=least, pdl=pdl)
        for splits, least, pdl in product((16, 32, 64, 96, 128), (1, 2, 4), (False, True))
    ]


def measured(case: Case, data: Data, launches: Sequence[L], time: Callable[[Case, Data, L], float], best: float) -> L:
    """The fastest; prints the eight that are."""
    times: list[tuple[float, L]] = []
    for launch in launches:
        try:
            times.append((time(case, data, launch), launch))
        except OutOfResources:
            continue
    times.sort(key=lambda pair: pair[0])
    table = Table("us", "share", "launch", title=f"{case}: {len(times)} of {len(launches)} launches ran")
    for seconds, launch in times[:8]:
        table.add_row(f"{seconds * 1e6:.1f}", f"{best / seconds:.0%}", repr(launch))
    Console(width=150).print(table)
    return times[0][1]


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    with torch.inference_mode():
        bandwidth, rate = copy_bandwidth(), matrix_rates()[0]
        if "prefill" in sys.argv[1:]:
            few = [PrefillLaunch(*tile, tma=True, early=True) for tile in _FEW]
            for case in PREFILL:
                measured(case, data_of(case), [chosen_prefill(case), *few], time_prefill, case.operations / rate)
            return
        for case in CODED:
            data, best = data_of(case), case.kv_bytes / bandwidth
            fastest = measured(case, data, coded_launches(case), time_decode, best)
            splits = [replace(fastest, splits=splits) for splits in (32, 64, 96, 128) if splits != fastest.splits]
            measured(case, data, splits, time_decode, best)
            del data
        if "coded" in sys.argv[1:]:
            return
        for case in DECODE:
            data, best = data_of(case), case.kv_bytes / bandwidth
            fastest = measured(case, data, decode_launches(case), time_decode, best)
            measured(case, data, split_launches(fastest), time_decode, best)
            del data
        others = [PrefillLaunch(*tile, tma=tma) for tile in _PREFILL for tma in (False, True)]
        for case in PREFILL:
            measured(case, data_of(case), [chosen_prefill(case), *others], time_prefill, case.operations / rate)


if __name__ == "__main__":
    main()
