"""Which kernels a step launches, how long each takes, and how long the GPU waits."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 3
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    start: float
    """Microseconds since the first of the trace."""
    us: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    name: str
    launches: float
    """A step; so are the microseconds."""
    us: float


@dataclass(frozen=True, slots=True)
class Trace:
    kernels: tuple[KernelTime, ...]
    """The one that takes most first."""
    busy: float
    """Microseconds a step in which any kernel or copy ran."""
    span: float
    """Microseconds a step from the first launch's start to the last one's end."""
    launches: tuple[Launch, ...]
    """Of all steps, in order."""


def traced(step: Callable[[], object], device: torch.device, steps: int = STEPS) -> Trace:
    """Of `steps` calls, behind one that starts the profiler. On a CPU its outermost operators count as kernels."""
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    for count in (1, steps):
        with profile(activities=[activity]) as profiler:
            for _ in range(count):
                step()
            if cuda:
                torch.cuda.synchronize()
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    launches = [
        Launch(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events() or ()
        if event.device_type == kind and event.cpu_parent is None and not event.is_user_annotation
    ]
    return summed(launches, steps)


def summed(launches: Iterable[Launch], steps: int) -> Trace:
    """Raises ValueError where there are none."""
    ordered = sorted(launches, key=lambda launch: launch.start)
    if not ordered:
        raise ValueError("nothing was launched")
    first = ordered[0].start
    ordered = [Launch(launch.name, launch.start - first, launch.us) for launch in ordered]
    times: dict[str, list[float]] = defaultdict(list)
    busy = end = 0.0
    for launch in ordered:
        times[launch.name].append(launch.us)
        busy += max(0.0, launch.start + launch.us - max(end, launch.start))  # kernels may overlap
        end = max(end, launch.start + launch.us)
    kernels = [KernelTime(name, len(each) / steps, sum(each) / steps) for name, each in times.items()]
    kernels.sort(key=lambda kernel: -kernel.us)
    return Trace(tuple(kernels), busy / steps, end / steps, tuple(ordered))


def show(name: str, trace: Trace, step_us: float) -> None:
    """`step_us`: of a step that is not traced."""
    table = Table("kernel", "launches", "us", "share", title=f"{name}: a step")
    for kernel in trace.kernels[:_SHOWN]:
        table.add_row(kernel.name[:90], f"{kernel.launches:g}", f"{kernel.us:.1f}", f"{kernel.us / step_us:.1%}")
    rest = trace.kernels[_SHOWN:]
    if rest:
        launches, us = sum(kernel.launches for kernel in rest), sum(kernel.us for kernel in rest)
        table.add_row(f"{len(rest)} others", f"{launches:g}", f"{us:.1f}", f"{us / step_us:.1%}")
    Console(width=140).print(table)
    launches = sum(kernel.launches for kernel in trace.kernels)
    print(
        f"{launches:g} launches a step; the device works {trace.busy:.0f} us of a step: {trace.busy / trace.span:.1%} "
        f"of {trace.span:.0f} us while traced, {trace.busy / step_us:.1%} of {step_us:.0f} us else",
        flush=True,
    )


def save(path: Path, traces: dict[str, Trace]) -> None:
    """As JSON, by the name of what was traced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(trace) for name, trace in traces.items()}))
