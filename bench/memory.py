"""A small card rehearsed on a large one: what the memory plan says beside what the engine takes, part by part, while it
reads a prompt as long as its context and decodes behind it.

    memory/<vram>/<recipe>/pool-tokens       that the plan's pages hold
    memory/<vram>/<recipe>/planned           bytes, all lines but the headroom
    memory/<vram>/<recipe>/peak              bytes: the most that PyTorch had reserved since the weights were there, and
                                             what the process had beside; limit: planned
    memory/<vram>/<recipe>/peak-over-plan    their quotient
    memory/<vram>/<recipe>/allocated         the same with what PyTorch had given away in place of reserved, without
                                             what graphs keep for themselves
    memory/<vram>/<recipe>/<part>            bytes; limit: the plan's lines for it
    memory/<vram>/<recipe>/prefill, decode   tokens/s

Weights are random bits in the formats of a recipe, made on the device under the same cap (SAMOVAR_VRAM) as all else.
Making them takes more for a moment than they do: the count of the peak begins behind them. The real loader's peak is
not looked at here; `python -m bench serve-packed` loads by it under a cap. `python -m bench memory --help` says how to
choose.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from bench import engine, results
from bench.device_memory import used_bytes
from bench.engine_rig import REACH, EngineRig
from bench.random_model import LAYERS, random_model, shape
from bench.results import Entry
from bench.shape_source import ShapeSource
from services import settings
from services.engine.config import EngineConfig
from services.engine.memory_advice import plan
from services.engine.memory_plan import DECODES, DEVICE, DRAFT, HEADROOM, PAGES, STATES, WEIGHTS, WORKSPACE, MemoryPlan
from services.engine.plan_table import show
from services.engine.sizing import alternatives, cap, sizes, wish
from services.engine.weights import recipes
from services.engine.weights.loader import resolve_device, resolve_dtype
from services.protocol.hashing import BLOCK_TOKENS

_STEPS = 64
"""Of a decode."""
_SESSION_TOKENS = 8192
"""Of the prompts that are read and answered at once, at most."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes; 0 throughout where there is no GPU."""

    allocated: int = 0
    most_allocated: int = 0
    reserved: int = 0
    most_reserved: int = 0
    beside: int = 0
    """That the process has of the GPU beside what PyTorch reserved: the driver's context and the code of kernels."""

    def told(self, name: str) -> str:
        values = (self.allocated, self.most_allocated, self.reserved, self.most_reserved, self.beside)
        return f"{name:34}" + "".join(f"{value / _MIB:11.1f}" for value in values)


HEADING = f"{'MiB':34}{'allocated':>11}{'most':>11}{'reserved':>11}{'most':>11}{'beside':>11}"


class Meter:
    """Reads a GPU that nobody else uses meanwhile. To be made before this process has touched it."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError where the driver does not say what it has given away."""
        self._device = device
        self._before = self._used() if device.type == "cuda" else 0

    def _used(self) -> int:
        used = used_bytes()
        if used is None:
            raise RuntimeError("nvidia-smi does not say how much memory is used")
        return used

    def begin(self) -> None:
        """The peaks count from here."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def read(self, name: str) -> Reading:
        """Now, and the most since `begin`. Prints a line."""
        if self._device.type != "cuda":
            return Reading()
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        reading = Reading(
            torch.cuda.memory_allocated(),
            torch.cuda.max_memory_allocated(),
            reserved,
            torch.cuda.max_memory_reserved(),
            self._used() - self._before - reserved,
        )
        print(reading.told(name), flush=True)
        return reading


@dataclass(frozen=True, slots=True)
class Options:
    config: EngineConfig
    vram: str
    tiny: bool
    layers: int
    copy: Path | None


class Memory:
    def __init__(self, options: Options, report: Callable[..., None]) -> None:
        """`report`: takes a name, a value, a unit and a limit."""
        self._options, self._report = options, report
        self._config = options.config
        self._device = resolve_device(options.config)
        self._dtype = resolve_dtype(options.config, self._device)

    def run(self) -> None:
        """Raises SettingsError where nothing fits, and what torch raises when the memory is not there."""
        config, device = self._config, self._device
        meter = Meter(device)
        raw = {**shape(self._options.layers), "mtp_num_hidden_layers": 1, **(engine.TINY if self._options.tiny else {})}
        source, recipe = ShapeSource(raw), recipes.load(config.recipe)
        cap(config, device)
        wanted = wish(source, config, device, int(config.vram))
        taken = sizes(source, config, device, recipe=recipe)
        found = plan(taken, wanted, lambda: alternatives(source, config, device, recipe=recipe))
        show(found, Console(width=118, highlight=False))
        self._report("pool-tokens", found.pages * BLOCK_TOKENS, "tokens")
        print(HEADING, flush=True)
        torch.zeros(1, device=device)
        meter.read("context")
        begin = time.monotonic()
        torch.manual_seed(0)
        weights = random_model(raw, recipe, self._dtype, device)
        meter.read("weights, as they were made")
        meter.begin()
        loaded = meter.read(f"weights, in {time.monotonic() - begin:.0f} s")
        running = min(config.max_running, found.states)
        rig = EngineRig(weights, found.pages, found.states, config.kv_format, config.state_dtype, device, running, 0)
        pools = meter.read("pages and states")
        begin = time.monotonic()
        count = rig.capture(running, found.context, config.graph_seconds)
        graphs = meter.read(f"{count} graphs, in {time.monotonic() - begin:.0f} s")
        begin = time.monotonic()
        rig.rehearse(found.chunk)
        meter.read(f"rehearsal, in {time.monotonic() - begin:.0f} s")
        last = self._work(rig, found, running, meter)
        rig.close()
        if device.type == "cuda":
            self._compare(found, loaded, pools, graphs, last)

    def _work(self, rig: EngineRig, found: MemoryPlan, running: int, meter: Meter) -> Reading:
        tokens = found.context - REACH
        seconds, decoded = rig.answer(tokens, 1, found.chunk, _STEPS)
        meter.read(f"a prompt of {tokens:,}, {_STEPS} steps")
        self._report("prefill", round(tokens / seconds, 1), "tokens/s")
        self._report("decode", round(decoded.rate, 1), "tokens/s")
        several = max(1, min(_SESSION_TOKENS, found.pages // running * BLOCK_TOKENS - REACH))
        _, decoded = rig.answer(several, running, found.chunk, _STEPS)
        last = meter.read(f"{running} of {several:,} at once, {_STEPS} steps")
        self._report(f"decode-{running}", round(decoded.rate, 1), "tokens/s")
        return last

    def _compare(self, found: MemoryPlan, loaded: Reading, pools: Reading, graphs: Reading, last: Reading) -> None:
        report = self._report
        report("weights", loaded.allocated, "bytes", found.bytes(WEIGHTS) + found.bytes(DRAFT))
        report(
            "pages-and-states", pools.allocated - loaded.allocated, "bytes", found.bytes(PAGES) + found.bytes(STATES)
        )
        # What graphs work in is free between them, and reserved.
        report("graphs", graphs.reserved - pools.reserved, "bytes", found.bytes(DECODES))
        report("workspace", last.most_allocated - graphs.allocated, "bytes", found.bytes(WORKSPACE))
        report("beside-torch", last.beside, "bytes", found.bytes(DEVICE))
        planned = found.used - found.bytes(HEADROOM)
        report("planned", planned, "bytes", found.used)
        report("allocated", last.most_allocated + last.beside, "bytes", planned)
        peak = last.most_reserved + last.beside
        report("peak", peak, "bytes", planned)
        report("peak-over-plan", round(peak / planned, 4), "")


def main(arguments: Sequence[str] = ()) -> None:
    options = _options(arguments)
    cuda = options.config.device == "cuda"
    if not cuda and not options.tiny:
        print("no CUDA device: nothing measured (--shape tiny tries the bench itself)")
        return
    whole = cuda and not options.tiny and options.layers == LAYERS
    case = f"memory/{options.vram}/{options.config.recipe}"

    def report(name: str, value: float, unit: str, limit: float | None = None) -> None:
        ratio = round(value / limit, 4) if limit else None
        entry = Entry(f"{case}/{name}", value, unit, ratio, limit)
        print(f"{entry.name}: {value:,} {unit}" + (f" of {limit:,}, {ratio:.1%}" if ratio else ""), flush=True)
        if whole:
            gpu = torch.cuda.get_device_name()
            path = results.merge_entries(f"memory-{gpu.split()[-1].lower()}", [entry], gpu)
            if options.copy is not None:
                (options.copy / path.name).write_bytes(path.read_bytes())

    try:
        Memory(options, report).run()
    except settings.SettingsError as error:
        sys.exit(f"bench memory: {error}")


def _options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench memory", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--vram", default="16GiB", help="of the card that is rehearsed; default 16GiB")
    parser.add_argument("--recipe", default="gsq3", choices=recipes.names(), help="default gsq3")
    parser.add_argument("--kv", default="rk4v4-e8", metavar="FORMAT", help="of K and V; default rk4v4-e8")
    parser.add_argument("--context", type=int, default=102400, help="tokens that a session must hold; default 102400")
    parser.add_argument("--sessions", type=int, default=4, help="requests in a batch at most; default 4")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a step; 0: what the plan chooses")
    parser.add_argument("--graph-seconds", type=float, default=60.0, help="to capture graphs in; default 60")
    parser.add_argument(
        "--shape", choices=("27b", "tiny"), default="27b", help="tiny: on a CPU too; nothing is written"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="fewer: nothing is written, only printed")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="put the results there too")
    chosen = parser.parse_args(arguments)
    if chosen.context <= REACH:
        parser.error(f"--context: more than {REACH}")
    config = settings.load(
        EngineConfig,
        {},
        device="cuda" if torch.cuda.is_available() else "cpu",
        weights="packed",
        vram=chosen.vram,
        recipe=chosen.recipe,
        kv_format=chosen.kv,
        max_model_len=str(chosen.context),
        max_running=str(chosen.sessions),
        max_batch_tokens=str(chosen.chunk),
        graph_seconds=str(chosen.graph_seconds),
    )
    return Options(config, chosen.vram, chosen.shape == "tiny", chosen.layers, chosen.copy)
