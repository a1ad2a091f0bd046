"""Prefill of a gated delta net at the 27B's shape, on a GPU: the whole of a layer behind its projection, what stands
before the rule, and a table of all kernels. `python -m bench gated-delta-prefill`."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import results
from bench.gated_delta import CHANNELS, DIM, KEY_HEADS, LAYERS, VALUE_HEADS, WIDTH
from bench.linear import copy_bandwidth
from bench.results import Entry
from kernels.conv import causal_conv
from kernels.gated_delta import flash, gated_delta
from kernels.gated_delta.front import front
from kernels.gated_delta.launch import SpanLaunch
from kernels.gated_delta.net import NetInputs, NetWeights, gates
from kernels.gated_delta.spans import prefill
from kernels.state_plan import plan_recurrence

TOKENS = (512, 2048, 8192)
SPANS = (2048, 512, 512, 256, 256, 128, 128, 64, 64, 64, 33, 17, 9, 5, 3, 2)
"""Of a step with many sequences."""
LAUNCHES = [SpanLaunch(rows, size, size // 128) for rows in (4, 8, 16) for size in (128, 256, 512, 1024)]
CHUNK = 64
_INNER, _MODEL = torch.float16, torch.bfloat16


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    device = torch.cuda.get_device_name()
    entries: list[Entry] = []
    with torch.inference_mode():
        for entry in timings():
            print(
                f"{entry.name}: {entry.value} {entry.unit}" + (f" ({entry.ratio:g})" if entry.ratio else ""), flush=True
            )
            entries.append(entry)
        for tokens in TOKENS:
            print(f"\nkernels of a layer, {tokens} tokens:")
            for name, launches, seconds in breakdown(Net((tokens,)).layers):
                print(f"  {seconds * 1e6:8.1f} us {launches:5.1f}x {name}")
    print(f"written to {results.write_entries(f'gated-delta-prefill-{device.split()[-1].lower()}', entries, device)}")


class Net:
    """One step's inputs, and weights and a state pool of all layers, with random contents."""

    def __init__(self, counts: tuple[int, ...], x: torch.dtype = torch.float32) -> None:
        cuda, tokens = torch.device("cuda"), sum(counts)
        self.net = NetWeights(
            (torch.randn(WIDTH, CHANNELS, device=cuda) * 0.5).to(_MODEL),
            torch.randn(VALUE_HEADS, device=cuda),
            torch.randn(VALUE_HEADS, device=cuda),
            KEY_HEADS,
            DIM,
            DIM,
        )
        mixed = torch.randn(tokens, CHANNELS + VALUE_HEADS * DIM, device=cuda).to(x)[:, :CHANNELS]
        b, a = torch.randn(tokens, 2 * VALUE_HEADS, device=cuda).chunk(2, dim=1)
        self.inputs = NetInputs(mixed, a, b)
        self.states = torch.zeros(len(counts), LAYERS, VALUE_HEADS, DIM, DIM, device=cuda)
        self.columns = torch.zeros(len(counts), LAYERS, WIDTH - 1, CHANNELS, dtype=_MODEL, device=cuda)
        self.plan = plan_recurrence(counts, range(len(counts)), cuda)

    def layers(self) -> None:
        for layer in range(LAYERS):
            columns, states = self.columns[:, layer], self.states[:, layer]
            prefill(self.inputs, self.net, columns, states, self.plan, _INNER)

    def fronts(self) -> None:
        for layer in range(LAYERS):
            front(self.inputs, self.net, self.columns[:, layer], self.plan, _INNER, unit=True)

    def rules(self) -> None:
        rows = front(self.inputs, self.net, self.columns[:, 0].clone(), self.plan, _INNER, unit=True)
        for layer in range(LAYERS):
            flash.packed(rows, self.states[:, layer], self.plan)

    def apart(self) -> None:
        """Convolution and gates by operations of torch, norms by flash-linear-attention."""
        for layer in range(LAYERS):
            mixed = causal_conv(self.inputs.mixed, self.net.taps, self.columns[:, layer], self.plan, _INNER)
            widths = (self.net.key_width, self.net.key_width, VALUE_HEADS * DIM)
            q, k, v = (x.unflatten(1, (-1, DIM)) for x in mixed.split(widths, dim=1))
            g, beta = gates(self.inputs.a, self.inputs.b, self.net)
            gated_delta(q, k, v, g, beta, self.states[:, layer], self.plan)


def timings() -> Iterator[Entry]:
    copy = copy_bandwidth()
    yield Entry("ceiling/copy", round(copy / 1e12, 3), "TB/s")
    shapes = [(str(tokens), (tokens,)) for tokens in TOKENS] + [(f"{len(SPANS)}spans", SPANS)]
    for name, counts in shapes:
        net, tokens = Net(counts), sum(counts)
        before = _front_bytes(tokens, 4) / copy
        rule = _rule_bytes(tokens) / copy
        yield _entry(f"front/{name}", _layer(net.fronts), before)
        yield _entry(f"front-bf16/{name}", _layer(Net(counts, torch.bfloat16).fronts), _front_bytes(tokens, 2) / copy)
        if not flash.usable(torch.empty(0, dtype=_INNER, device="cuda")):
            continue
        yield _entry(f"rule/{name}", _layer(net.rules), rule)
        yield _entry(f"layer/{name}", _layer(net.layers), before + rule)
        yield Entry(f"layer-on-the-host/{name}", round(_host(net.layers) * 1e6, 1), "us")
        yield Entry(f"peak-of-a-layer/{name}", round(_peak(net.layers) / tokens), "bytes a token")
        yield _entry(f"apart/{name}", _layer(net.apart), None)
    for tokens in TOKENS[1:]:
        net, best = Net((tokens,)), _front_bytes(tokens, 4) / copy
        for launch in LAUNCHES:
            with patch("kernels.gated_delta.front.span_launch", return_value=launch):
                name = f"rows{launch.rows}-elements{launch.elements}-warps{launch.warps}"
                yield _entry(f"sweep/front/{tokens}/{name}", _layer(net.fronts), best)


def _front_bytes(tokens: int, item: int) -> int:
    """Rows in, of `item` bytes a number, and q, k, v out; with the gates' inputs and outputs."""
    return tokens * (CHANNELS * (item + 2) + 4 * 4 * VALUE_HEADS)


def _rule_bytes(tokens: int) -> int:
    """What flash-linear-attention's five kernels and its zeros read and write, each tensor once a kernel: the matrix of
    each chunk is zeroed and written from k; w and u come of it, k and v; a state for each chunk and the new values come
    of w, u and k; the output comes of q, k, those states and the new values."""
    keys, values = KEY_HEADS * DIM, VALUE_HEADS * DIM
    matrix, states = VALUE_HEADS * CHUNK, VALUE_HEADS * DIM * DIM // CHUNK
    solve = matrix + keys + matrix
    w_u = matrix + keys + values + 2 * values
    state = 2 * values + keys + states + values
    output = 2 * keys + values + states + values
    return tokens * 2 * (solve + w_u + state + output)


def _entry(name: str, seconds: float, best: float | None) -> Entry:
    share = None if best is None else round(best / seconds, 3)
    return Entry(name, round(seconds * 1e6, 1), "us a layer", share, None if best is None else round(best * 1e6, 1))


def _layer(run: Callable[[], None], times: int = 5) -> float:
    """Seconds a layer, of all layers behind each other."""
    for _ in range(2):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return median(one.elapsed_time(other) for one, other in pairwise(marks)) / 1e3 / LAYERS


def _host(run: Callable[[], None], times: int = 5) -> float:
    """Seconds a layer until all is launched; more than the GPU takes, and it waits for the host."""
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return median(taken) / LAYERS


def _peak(run: Callable[[], None]) -> int:
    """Bytes above what is there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def breakdown(run: Callable[[], None]) -> list[tuple[str, float, float]]:
    """Kernels and copies of a layer, the longest first: name, launches and seconds in all."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    kernels = [event for event in recorded.key_averages() if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: event.self_device_time_total, reverse=True)
    return [(each.key[:90], each.count / LAYERS, each.self_device_time_total / 1e6 / LAYERS) for each in kernels]


if __name__ == "__main__":
    main()
