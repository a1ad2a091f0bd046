"""The kernels between the matrix products on a GPU: a launch at the 27B's shapes beside what it moves at copy
bandwidth.

A graph has launches of one kernel behind each other, on the same values, with matrices of their own that the L2 does
not hold. Few tokens cost what a launch costs, so it matters that they overlap, as they do in a step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.linear import copy_bandwidth, random_weight, replayed
from bench.results import Entry, write_entries
from kernels import norm_rope
from kernels.elementwise import add, sigmoid_gated, silu_gated
from kernels.embedding import embed
from kernels.linear import linear

TOKENS = (1, 8, 8192)
_LAUNCHES = 160
"""In a graph of few tokens; so many matrices of 96 rows are three times the L2."""
_MANY = 8
"""In one of many."""
_HIDDEN, _WIDTH = 5120, 17408
_FLOAT32, _BRAIN, _HALF = 4, 2, 2


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[int], object]
    """The launch of so many layers before it."""
    nbytes: int
    """Read and written."""


def cases(tokens: int) -> list[Case]:
    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    brain = torch.bfloat16
    x, out = normal(tokens, _HIDDEN), normal(tokens, _HIDDEN, dtype=brain)
    projected = normal(tokens, 16384)
    o, z = normal(tokens, 48, 128, dtype=torch.half), projected[:, 10240:].unflatten(1, (48, 128))
    wide = normal(tokens, 14336, dtype=brain)
    gate = wide[:, :12288].unflatten(1, (24, 512))[..., 256:]
    attended, gate_up = normal(tokens, 24, 256, dtype=brain), normal(tokens, 2 * _WIDTH, dtype=brain)
    norms, gated = normal(_LAUNCHES, _HIDDEN, dtype=brain), normal(_LAUNCHES, 128, dtype=brain)
    matrices = normal(_LAUNCHES, 96, _HIDDEN, dtype=brain)
    positions = torch.randint(0, 2**18, (tokens,), device="cuda")
    frequencies = 1.0 / 1e7 ** (torch.arange(32, device="cuda") / 32)
    ids = torch.randint(0, 248_320, (_LAUNCHES, tokens), device="cuda")
    value, hidden = tokens * 48 * 128, tokens * _HIDDEN
    heads, width = tokens * 24 * 256, tokens * _WIDTH
    found = [
        Case(
            "norm",
            lambda layer: norm_rope.rms_norm_centred(x, norms[layer], 1e-6, brain),
            hidden * (_FLOAT32 + _BRAIN),
        ),
        Case(
            "gated-norm",
            lambda layer: norm_rope.rms_norm_gated(o, z, gated[layer], 1e-6, brain),
            value * (_HALF + _FLOAT32 + _BRAIN),
        ),
        Case("angles", lambda _: norm_rope.rotary_angles(positions, frequencies), tokens * (8 + 2 * 32 * _FLOAT32)),
        Case("sigmoid-gate", lambda _: sigmoid_gated(attended, gate), 3 * heads * _BRAIN),
        Case("silu-gate", lambda _: silu_gated(gate_up), 3 * width * _BRAIN),
        Case("add", lambda _: add(x, out), hidden * (2 * _FLOAT32 + _BRAIN)),
        Case(
            "beta-decay",
            lambda layer: linear(out, matrices[layer], dtype=torch.float32),
            hidden * _BRAIN + matrices[0].nbytes + tokens * 96 * _FLOAT32,
        ),
    ]
    for format in ("fp8", "nvfp4", "int4-g64"):
        table = random_weight(format, 248_320, _HIDDEN)

        def taken(layer: int, table: object = table) -> Tensor:
            return embed(ids[layer], table, brain)  # type: ignore[arg-type]

        row = table.nbytes / table.rows
        found.append(Case(f"embed/{format}", taken, round(tokens * (row + _HIDDEN * _BRAIN))))
    return found


def measure(tokens: int, bandwidth: float) -> list[Entry]:
    launches = _LAUNCHES if tokens <= 64 else _MANY
    entries = []
    for case in cases(tokens):

        def run(case: Case = case) -> None:
            for layer in range(launches):
                case.run(layer)

        seconds, best = replayed(run, launches), case.nbytes / bandwidth
        name = f"small/{case.name}/tokens{tokens}"
        entries.append(Entry(name, round(seconds * 1e6, 2), "us", round(best / seconds, 3), round(best * 1e6, 3)))
    return entries


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    device = torch.cuda.get_device_name()
    table = Table("kernel", "us", "at copy bandwidth, us", "share", title=f"{device}, a launch in a graph")
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        entries = [Entry("ceiling/copy", round(bandwidth / 1e12, 3), "TB/s")]
        for tokens in TOKENS:
            entries += measure(tokens, bandwidth)
            torch.cuda.empty_cache()
    for entry in entries[1:]:
        table.add_row(entry.name, f"{entry.value:g}", f"{entry.limit:g}", f"{entry.ratio:.0%}")
    Console(width=100).print(table)
    write_entries(f"small-kernels-{device.split()[-1].lower()}", entries, device)


if __name__ == "__main__":
    main()
