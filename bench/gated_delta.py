"""A gated delta net's few rows a sequence. On a GPU: decode, verify and fold at the 27B's shape, against the time that
copying their states would take (prefill: `bench.gated_delta_prefill`). On a CPU: how far states of 16 bits drift.
"""

import math
from collections.abc import Callable, Iterator
from statistics import median
from unittest.mock import patch

import torch

from bench import results
from bench.linear import copy_bandwidth, replayed
from bench.results import Entry
from kernels.conv import causal_conv
from kernels.gated_delta import NetInputs, NetWeights, decode, fold, gated_delta, reference, verify
from kernels.gated_delta.launch import StateLaunch
from kernels.gated_delta.net import empty_records, gates
from kernels.gated_delta.replay_reference import rounded
from kernels.state_plan import ReplayRows, plan_recurrence

LAYERS, KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 48, 16, 48, 128, 4
"""Of the 27B."""
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = (1, 4, 8, 16, 32)
ROWS = (2, 4, 8, 16)
LAUNCHES = [StateLaunch(columns, warps) for columns in (8, 16, 32, 64) for warps in (1, 2, 4)]
STEPS = 16384
HEADS = ((4, 0.5), (64, 0.5), (1024, 0.5), (16384, 0.5), (16384, 0.01))
"""Half-life in tokens, after which half of what a state held has faded, and beta, which is how much of what lies under
a key gives way to each new value: the last one remembers longest."""
DRIFT_SEEDS = 4


def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else ""
    entries: list[Entry] = []
    with torch.inference_mode():
        for entry in timings() if cuda else drifts():
            print(
                f"{entry.name}: {entry.value} {entry.unit}" + (f" ({entry.ratio:g})" if entry.ratio else ""), flush=True
            )
            entries.append(entry)
    topic = f"gated-delta-{device.split()[-1].lower()}" if cuda else "gated-delta-cpu"
    print(f"written to {results.write_entries(topic, entries, device)}")


class Stack:
    """All layers of the 27B for some sequences, with random contents: larger than the L2 together."""

    def __init__(self, batch: int, rows: int, state: torch.dtype) -> None:
        self.batch, self.rows = batch, rows
        half, cuda = torch.bfloat16, torch.device("cuda")
        self.net = NetWeights(
            (torch.randn(WIDTH, CHANNELS, device=cuda) * 0.5).to(half),
            torch.randn(VALUE_HEADS, device=cuda),
            torch.randn(VALUE_HEADS, device=cuda),
            KEY_HEADS,
            DIM,
            DIM,
        )
        total = batch * rows
        mixed = torch.randn(total, CHANNELS + VALUE_HEADS * DIM, device=cuda)[:, :CHANNELS]
        b, a = torch.randn(total, 2 * VALUE_HEADS, device=cuda).chunk(2, dim=1)
        self.inputs = NetInputs(mixed, a, b)
        self.states = torch.zeros(batch, LAYERS, VALUE_HEADS, DIM, DIM, dtype=state, device=cuda)
        self.columns = torch.zeros(batch, LAYERS, WIDTH - 1, CHANNELS, dtype=half, device=cuda)
        self.slots = torch.randperm(batch, device=cuda)
        first = torch.arange(batch, device=cuda) * rows
        self.places = ReplayRows(
            self.slots, first, torch.full((batch,), rows, dtype=torch.int32, device=cuda), first, rows
        )
        self.records = empty_records(LAYERS, total, self.net, torch.float16, half, cuda)
        self.out = torch.empty(total, VALUE_HEADS, DIM, dtype=torch.float16, device=cuda)

    @property
    def layer_bytes(self) -> int:
        """Of all sequences' states of a layer."""
        return self.states[:, 0].nbytes

    def decode(self) -> None:
        for layer in range(LAYERS):
            columns, states = self.columns[:, layer], self.states[:, layer]
            decode(self.inputs, self.net, columns, states, self.slots, self.places.tokens, self.out)

    def verify(self) -> None:
        for layer in range(LAYERS):
            columns, states = self.columns[:, layer], self.states[:, layer]
            verify(self.inputs, self.net, columns, states, self.places, self.records, layer, self.out)

    def fold(self) -> None:
        rows = self.places
        fold(self.net, self.columns, self.states, rows.slots, rows.places, rows.counts, self.records)

    def apart(self) -> None:
        """Decode as a CPU does it: convolution, gates and rule in plain torch."""
        plan = plan_recurrence([1] * self.batch, range(self.batch), self.states.device)
        for layer in range(LAYERS):
            mixed = causal_conv(self.inputs.mixed, self.net.taps, self.columns[:, layer], plan, torch.float16)
            widths = (self.net.key_width, self.net.key_width, VALUE_HEADS * DIM)
            q, k, v = (x.unflatten(1, (-1, DIM)) for x in mixed.split(widths, dim=1))
            g, beta = gates(self.inputs.a, self.inputs.b, self.net)
            gated_delta(q, k, v, g, beta, self.states[:, layer], plan)


def timings() -> Iterator[Entry]:
    copy = copy_bandwidth()
    yield Entry("ceiling/copy", round(copy / 1e12, 3), "TB/s")
    for kind, dtype in KINDS.items():
        for batch in BATCHES:
            stack = Stack(batch, 1, dtype)
            yield timed(f"decode/{kind}/batch{batch}", stack.decode, 2 * stack.layer_bytes / copy)
    for rows in ROWS:
        for batch in (1, 8):
            stack = Stack(batch, rows, torch.float32)
            yield timed(f"verify/fp32/rows{rows}/batch{batch}", stack.verify, stack.layer_bytes / copy)
            yield timed(f"fold/fp32/rows{rows}/batch{batch}", stack.fold, 2 * stack.layer_bytes / copy)
    stack = Stack(1, 1, torch.float32)
    yield unbounded("decode-in-torch/fp32/batch1", synchronised(stack.apart) / LAYERS)
    for batch in (1, 8):
        stack = Stack(batch, 1, torch.float32)
        wide = Stack(batch, 4, torch.float32)
        for launch in LAUNCHES:
            with patch("kernels.gated_delta.replay.state_launch", return_value=launch):
                name = f"columns{launch.columns}-warps{launch.warps}/batch{batch}"
                yield timed(f"sweep/decode/{name}", stack.decode, 2 * stack.layer_bytes / copy)
                yield timed(f"sweep/verify4/{name}", wide.verify, wide.layer_bytes / copy)


def timed(name: str, run: Callable[[], None], best: float) -> Entry:
    """A layer's share of `run`, in a graph; best: seconds that the bytes of a layer's states take."""
    seconds = replayed(run, LAYERS)
    return Entry(name, round(seconds * 1e6, 2), "us a layer", round(best / seconds, 3), round(best * 1e6, 2))


def unbounded(name: str, seconds: float) -> Entry:
    return Entry(name, round(seconds * 1e6, 2), "us a layer")


def synchronised(run: Callable[[], object], times: int = 10) -> float:
    """Seconds, for what no graph captures."""
    taken = []
    for _ in range(times + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return median(taken[2:])


def drifts() -> Iterator[Entry]:
    """Relative error of o against float64, over the last quarter of so many tokens, by head."""
    torch.manual_seed(0)
    heads = len(HEADS)
    size = (DRIFT_SEEDS, heads, DIM, DIM)
    states = {kind: torch.zeros(size, dtype=dtype) for kind, dtype in KINDS.items()}
    exact = torch.zeros(size, dtype=torch.float64)
    slope = torch.tensor([math.log(2) / half for half, _ in HEADS])
    strength = torch.tensor([2 * beta for _, beta in HEADS])
    errors = {kind: torch.zeros(heads, dtype=torch.float64) for kind in KINDS}
    power = torch.zeros(heads, dtype=torch.float64)
    marks = [STEPS // 16, STEPS // 4, STEPS]
    for token in range(STEPS):
        q, k, v = (torch.nn.functional.silu(torch.randn(DRIFT_SEEDS, heads, DIM)) for _ in range(3))
        g = -slope * (0.5 + torch.rand(DRIFT_SEEDS, heads))  # 1 on the average
        beta = strength * torch.randn(DRIFT_SEEDS, heads).sigmoid()
        wanted = reference.step(q.double(), k.double(), v.double(), g.double(), beta.double(), exact)
        mark = next(mark for mark in marks if token < mark)
        counted = token >= mark * 3 // 4
        for kind, dtype in KINDS.items():
            state = states[kind].float()
            o = reference.step(q, k, v, g, beta, state)
            states[kind] = rounded(state, dtype)
            if counted:
                errors[kind] += (o - wanted).square().sum((0, 2))
        if counted:
            power += wanted.square().sum((0, 2))
        if token + 1 == mark:
            for kind in KINDS:
                for (half, strong), share in zip(HEADS, (errors[kind] / power).sqrt().tolist(), strict=True):
                    yield Entry(f"drift/{kind}/half-life{half}-beta{strong}/steps{mark}", float(f"{share:.3g}"), "of o")
                errors[kind].zero_()
            power.zero_()
