"""Prefill and decode of the 27B's shape through the engine's own step loop, on random weights packed by each recipe,
with `transformers` beside it. Every case is printed and merged into docs/benchmarks at once, so a run that is cut keeps
what it has. `python -m bench engine --help` says how to choose.

    decode/<recipe>/depth<tokens>/batch<requests>   sampled at temperature 0.7 and top_p 0.95
    decode-greedy/...                               the same without sampling, at the least depth
    bytes/<recipe>/depth<tokens>/batch<requests>    that such a step must move
    verify/<recipe>/rows<tokens>                    a step of so many tokens of one sequence at the least depth; ratio:
                                                    to the time of a decode
    prefill/<recipe>/<tokens>                       a prompt from its arrival to the first token

Rates of decode are medians over steps; ratio and limit are those of the copy bandwidth that was measured just before.
"""

import argparse
import gc
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

from bench import engine_plot, engine_timeline, engine_trace, results
from bench.engine_peer import NAME, NoPeer, peer
from bench.engine_rig import EngineRig, fitting_pages, pages_for
from bench.engine_trace import Trace
from bench.linear import copy_bandwidth
from bench.random_model import LAYERS, RandomModel, random_model, shape
from bench.results import Entry
from services.engine.config import KvFormat, StateDtype
from services.engine.weights import recipes
from services.protocol.hashing import BLOCK_TOKENS

RECIPES = ("nvfp4-mixed", "fp8", "int4", "gsq3")
DEPTHS = (1024, 8192, 32768, 98304, 260096)
BATCHES = (1, 4, 8, 16)
PARTS = ("decode", "verify", "prefill", "peer")
VERIFIED = (1, 2, 4, 8, 16)
"""Tokens of a verified step."""
TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": 1024,
}
"""In place of the 27B's, where only the bench itself is tried."""
_TEMPERATURE = 0.7
_TIMES = 3
_ONCE = 16384
"""Tokens of a prompt from which on one prefill is measured, else the median of _TIMES."""
_PEER_TOKENS = 32768
"""Longer prompts are not given to the peer."""
_SPARE_STATES = 8
"""Slots beside those of the requests, for the checkpoints of a prefill: superseded ones make room."""


@dataclass(frozen=True, slots=True)
class Options:
    formats: tuple[str, ...]
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    parts: tuple[str, ...]
    layers: int
    kv_format: KvFormat
    state_dtype: StateDtype
    chunk: int
    graph_seconds: float
    seconds: float
    trace: Path | None
    copy: Path | None
    tiny: bool

    @property
    def raw(self) -> dict[str, Any]:
        """The model's config.json."""
        return {**shape(self.layers), **(TINY if self.tiny else {})}

    def name(self, recipe: str) -> str:
        """What differs from fp8 pages and float32 states is said."""
        kv = "" if self.kv_format == "fp8" else f"+{self.kv_format}"
        return recipe + kv + ("" if self.state_dtype == "float32" else f"+state-{self.state_dtype}")


class Report:
    """Prints entries and merges them into their file; `topic` empty: only prints."""

    def __init__(self, topic: str, device: str, copy: Path | None) -> None:
        self._topic, self._device, self._copy = topic, device, copy
        self.failures: list[str] = []

    def add(self, *entries: Entry) -> None:
        for entry in entries:
            limit = "" if entry.limit is None else f", {entry.ratio or 0:.1%} of {entry.limit:,.1f}"
            print(f"{entry.name}: {entry.value:,.1f} {entry.unit}{limit}", flush=True)
        if self._topic:
            self._kept(results.merge_entries(self._topic, entries, self._device))

    def failed(self, name: str, error: Exception) -> None:
        self.failures.append(name)
        print(f"{name}: FAILED: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)

    def picture(self, name: str, launches: Sequence[engine_trace.Launch]) -> None:
        """Of a traced case, beside the numbers."""
        if self._topic:
            path = results.FOLDER / f"{self._topic}-{name.replace('/', '-')}.svg"
            path.write_text(engine_timeline.svg(f"{name}, {self._device}: {engine_trace.STEPS} steps", launches))
            self._kept(path)

    def plot(self) -> None:
        if not self._topic:
            return
        entries = [entry for entry in results.read_entries(self._topic) if entry["gpu"] == self._device]
        try:
            picture = engine_plot.svg(f"Decode of the 27B's shape, {self._device}", entries)
        except ValueError:
            return  # only prefill was measured so far
        path = results.FOLDER / f"{self._topic}.svg"
        path.write_text(picture)
        self._kept(path)

    def _kept(self, path: Path) -> None:
        if self._copy is not None:
            self._copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, self._copy)


class Bench:
    def __init__(self, options: Options, device: torch.device, report: Report, bandwidth: float | None) -> None:
        """`bandwidth`: bytes a second that are read and written by a copy; None: not measured."""
        self._options, self._device, self._report, self._bandwidth = options, device, report, bandwidth
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._deadline = time.monotonic() + options.seconds if options.seconds else float("inf")
        self._traces: dict[str, Trace] = {}
        self.left_out = 0

    def run(self) -> None:
        for recipe in self._options.formats:
            if set(self._options.parts) - {"peer"}:
                self._case(recipe, partial(self._recipe, recipe))
                self._clean()
        if "peer" in self._options.parts:
            self._case(NAME, self._peer)
            self._clean()

    def _case(self, name: str, run: Callable[[], None]) -> None:
        if time.monotonic() >= self._deadline:
            self.left_out += 1
            return
        try:
            run()
        except RuntimeError as error:  # also what torch raises when the memory is not there
            self._report.failed(name, error)

    def _clean(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _recipe(self, recipe: str) -> None:
        begin = time.monotonic()
        weights = random_model(self._options.raw, recipes.load(recipe), self._dtype, self._device)
        rig = self._rig(weights)
        name = self._options.name(recipe)
        print(
            f"{name}: {weights.read_bytes / 1e9:.2f} GB of weights to read, {rig.pages} pages, made in "
            f"{time.monotonic() - begin:.1f} s",
            flush=True,
        )
        try:
            if "decode" in self._options.parts:
                self._decodes(rig, name)
            if "verify" in self._options.parts:
                self._case(f"verify/{name}", partial(self._verify, rig, name, min(self._options.depths)))
            if "prefill" in self._options.parts:
                for tokens in self._options.depths:
                    self._case(f"prefill/{name}/{tokens}", partial(self._prefill, rig, name, tokens))
        finally:
            rig.close()

    def _rig(self, weights: RandomModel) -> EngineRig:
        options = self._options
        wanted = [pages_for(depth, batch) for depth in options.depths for batch in (1, *options.batches)]
        states = max(options.batches) + _SPARE_STATES
        pages = fitting_pages(weights.model, wanted, states, options.kv_format, options.state_dtype, self._device)
        return EngineRig(
            weights,
            pages,
            states,
            options.kv_format,
            options.state_dtype,
            self._device,
            max(options.batches),
            options.graph_seconds,
        )

    def _decodes(self, rig: EngineRig, name: str) -> None:
        for depth in self._options.depths:
            for batch in self._options.batches:
                case = f"{name}/depth{depth}/batch{batch}"
                if pages_for(depth, batch) > rig.pages:
                    print(f"decode/{case}: {pages_for(depth, batch)} pages do not fit beside the weights", flush=True)
                    continue
                self._case(f"decode/{case}", partial(self._decode, rig, f"decode/{case}", depth, batch, _TEMPERATURE))
                if depth == min(self._options.depths):
                    greedy = f"decode-greedy/{case}"
                    self._case(greedy, partial(self._decode, rig, greedy, depth, batch, 0.0))

    def _decode(self, rig: EngineRig, case: str, depth: int, batch: int, temperature: float) -> None:
        found: list[Trace] = []

        def observe(step: Callable[[], object]) -> None:
            found.append(engine_trace.traced(step, self._device))

        tracing = self._options.trace is not None and temperature > 0
        decoded = rig.decode(depth, batch, temperature, observe=observe if tracing else None)
        moved = rig.step_bytes(depth, batch)
        limit = None if self._bandwidth is None else batch * self._bandwidth / moved
        ratio = None if limit is None else round(decoded.rate / limit, 3)
        rate = Entry(case, round(decoded.rate, 2), "tokens/s", ratio, None if limit is None else round(limit, 2))
        self._report.add(rate)
        if temperature > 0:
            self._report.add(Entry(f"bytes/{case.partition('/')[2]}", round(moved / 1e9, 3), "GB a step"))
        seconds = sorted(decoded.seconds)
        print(
            f"    {median(seconds) * 1e3:.2f} ms a step, slowest {seconds[-1] * 1e3:.2f} ms; over all steps "
            f"{decoded.mean_rate:,.1f} tokens/s",
            flush=True,
        )
        if found and self._options.trace is not None:
            self._traces[case] = found[0]
            engine_trace.show(case, found[0], median(seconds) * 1e6)
            engine_trace.save(self._options.trace, self._traces)
            if len(self._traces) == 1:  # the others look alike
                self._report.picture(case, found[0].launches)

    def _verify(self, rig: EngineRig, name: str, depth: int) -> None:
        """Ratio: to the time of a decode, which is the limit."""
        one = rig.verify(depth, 0)
        self._report.add(Entry(f"verify/{name}/decode", round(one * 1e3, 3), "ms"))
        for tokens in VERIFIED:
            seconds = rig.verify(depth, tokens)
            entry = f"verify/{name}/rows{tokens}"
            self._report.add(Entry(entry, round(seconds * 1e3, 3), "ms", round(seconds / one, 3), round(one * 1e3, 3)))

    def _prefill(self, rig: EngineRig, name: str, tokens: int) -> None:
        if pages_for(tokens, 1) > rig.pages:
            print(f"prefill/{name}/{tokens}: does not fit beside the weights", flush=True)
            return
        rig.prefill(min(tokens, self._options.chunk), self._options.chunk)  # kernels are compiled, and tuned
        times = _TIMES if tokens < _ONCE else 1
        seconds = median(rig.prefill(tokens, self._options.chunk) for _ in range(times))
        self._report.add(Entry(f"prefill/{name}/{tokens}", round(tokens / seconds, 1), "tokens/s"))

    def _peer(self) -> None:
        prefills = [depth for depth in self._options.depths if depth <= _PEER_TOKENS]
        try:
            for entry in peer(self._options.raw, self._dtype, self._device, prefills, prefills[:1]):
                self._report.add(entry)
        except NoPeer as error:
            print(f"{NAME}: {error}", flush=True)


def main(arguments: Sequence[str] = ()) -> None:
    options = _options(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and not options.tiny:
        print("no CUDA device: nothing measured (--tiny tries the bench itself)")
        return
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else ""
    whole = cuda and not options.tiny and options.layers == LAYERS
    report = Report(f"engine-{name.split()[-1].lower()}" if whole else "", name, options.copy)
    torch.manual_seed(0)
    bandwidth = None
    if cuda:
        bandwidth = copy_bandwidth()
        report.add(Entry("ceiling/copy", round(bandwidth / 1e12, 3), "TB/s"))
    bench = Bench(options, device, report, bandwidth)
    bench.run()
    report.plot()
    if bench.left_out:
        print(f"{bench.left_out} cases left out: {options.seconds:g} s were over")
    if report.failures:
        sys.exit(f"failed: {', '.join(report.failures)}")


def _options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench engine", description=(__doc__ or "").partition("\n\n")[0])

    def several(flag: str, default: Sequence[Any], known: Sequence[str] = ()) -> None:
        def values(text: str) -> tuple[Any, ...]:
            parts = tuple(text.split(","))
            if known and (unknown := set(parts) - set(known)):
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}; known: {', '.join(known)}")
            return parts if known else tuple(map(int, parts))

        written = ",".join(map(str, default))
        parser.add_argument(flag, type=values, default=tuple(default), metavar="A,B", help=f"default {written}")

    several("--format", RECIPES, recipes.names())
    several("--depth", DEPTHS)
    several("--batch", BATCHES)
    several("--only", PARTS, PARTS)
    parser.add_argument("--layers", type=int, default=LAYERS, help="fewer: nothing is written, only printed")
    parser.add_argument("--kv-format", choices=get_args(KvFormat), default="fp8")
    parser.add_argument("--state-dtype", choices=get_args(StateDtype), default="float32")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step of prefill at most; default 8192")
    parser.add_argument("--graph-seconds", type=float, default=120.0, help="to capture graphs in; 0: kernel by kernel")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no case after so long; 0: all")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="kernels of three steps of each decode, as JSON")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="put the results there too")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU too; nothing is written")
    chosen = parser.parse_args(arguments)
    if any(depth < 1 or depth % BLOCK_TOKENS for depth in chosen.depth):
        parser.error(f"--depth: contexts are of whole pages, multiples of {BLOCK_TOKENS} tokens")
    if chosen.layers < 4 or min(chosen.batch) < 1:
        parser.error("--layers is at least 4, --batch at least 1")
    return Options(
        chosen.format,
        tuple(sorted(chosen.depth)),
        tuple(sorted(chosen.batch)),
        chosen.only,
        chosen.layers,
        chosen.kv_format,
        chosen.state_dtype,
        chosen.chunk,
        chosen.graph_seconds,
        chosen.seconds,
        chosen.trace,
        chosen.copy,
        chosen.tiny,
    )
