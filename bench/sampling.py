"""The draw on a GPU: microseconds of a captured step's two launches, for logits that lie in the L2 where they fit.

The limit is reading the logits once.
"""

import torch
from rich.console import Console
from rich.table import Table

from bench.linear import copy_bandwidth, replayed
from bench.results import Entry, write_entries
from kernels.sampling import Adjustment, DrawRow, DrawTable, cells_of, draw_rows, draw_workspace

VOCAB = 248320
ROWS = (1, 8, 64)
_DRAWS = 16
"""In a graph, so that its own start does not count."""
_SPREADS = {"peaked": 4.0, "flat": 1.0, "flat-bf16": 1.0}
"""Standard deviation of normal logits: the first like a model's; the others like random weights', the last rounded to
bf16, so that many are equal at every border. No greedy row looks different on them."""


def kinds(device: torch.device) -> dict[str, DrawRow]:
    cells = cells_of(range(0, VOCAB, 10), range(1000), VOCAB, device)
    return {
        "greedy": DrawRow(0.0),
        "temperature": DrawRow(0.7, uniform=0.3),
        "top-p": DrawRow(0.7, top_p=0.95, uniform=0.3),
        "top-k-20-top-p": DrawRow(0.7, top_k=20, top_p=0.8, uniform=0.3),
        "top-k-50000-top-p": DrawRow(0.7, top_k=50000, top_p=0.95, uniform=0.3),
        "penalties": DrawRow(0.0, adjustment=Adjustment(cells, 1.1, 0.5, 0.1)),
    }


def time_draws(row: DrawRow, count: int, spread: str, device: torch.device) -> float:
    """Seconds a step."""
    table, workspace = DrawTable(count, device), draw_workspace(count, device)
    table.fill([row] * count)
    logits = torch.randn(count, VOCAB, device=device) * _SPREADS[spread]
    if spread.endswith("bf16"):
        logits = logits.bfloat16().float()
    tokens = torch.zeros(count, dtype=torch.int64, device=device)

    def run() -> None:
        for _ in range(_DRAWS):
            draw_rows(logits, table, workspace, tokens)

    return replayed(run, _DRAWS)


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    device, name = torch.device("cuda"), torch.cuda.get_device_name()
    table = Table("draw", "us", "share of the limit", title=f"{name}, V = {VOCAB}")
    entries = []
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        for kind, row in kinds(device).items():
            for spread in _SPREADS:
                if row.temperature == 0 and spread != "peaked":
                    continue
                for count in ROWS:
                    seconds = time_draws(row, count, spread, device)
                    best = count * VOCAB * 4 / bandwidth
                    label = f"sampling/{kind}/{spread}/rows{count}"
                    entries.append(Entry(label, round(seconds * 1e6, 2), "us", round(best / seconds, 3)))
                    table.add_row(label, f"{seconds * 1e6:.1f}", f"{best / seconds:.0%}")
    Console(width=100).print(table)
    write_entries(f"sampling-{name.split()[-1].lower()}", entries, name)
