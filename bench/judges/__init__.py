"""`python -m bench judges`: PyPI's `cache-pressure` and questions of our own, one after the other against the same
stack, which is not cleaned between them.

    needle, needle-again   needle-test, before and after the others (with a model that can find something)
    pressure               cache-pressure: 65 contexts, of which the device holds a part
    agent, agent-200k      agent-sim: four agents with two sub-agents each; the second on a stack with a smaller pool
    abort                  abort-sim: a client stops a thought and goes on from it
    leave                  a client leaves in the middle of a prefill, and asks the same again
    perf                   perf-sim: speed by context
    restart                `kill -9` of the engine with contexts in the host tier; then what a restore takes

All that is said is kept under --folder; numbers are merged into docs/benchmarks after each part. Exit code 1 when a
part failed or a number misses its limit.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench import results
from bench.judges import checkpoint
from bench.judges.outside import MODEL, NoVerdict, OutsideJudges, has_cache_pressure
from bench.judges.parts import ON_SMALL_POOL, PARTS, Court, Part
from bench.judges.scales import SCALES, SMALL_MODEL, Pool, Scale
from bench.judges.server import StackEnded, serving
from bench.results import Entry

LAYERS = 64
"""Of the 27B."""
JUDGE_PYTHON = Path(__file__).resolve().parents[2] / ".venv-judge" / "bin" / "python"
"""Made by `make`."""
_BEST_LOW = ("/ms", "read-twice", "most-computed", "decode-loss")
"""Ends of the names whose limit must not be exceeded; others must be reached."""


@dataclass(frozen=True, slots=True)
class Options:
    scale: Scale
    parts: tuple[str, ...]
    python: Path
    folder: Path
    model: Path | None
    layers: int
    copy: Path | None
    write: bool
    salt: int
    seconds: float
    """After which no part is begun any more."""


class Session:
    """All parts that are wanted, and what came of them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._device = _gpu() if options.scale.device == "cuda" else ""
        self._deadline = time.monotonic() + options.seconds
        self.entries: list[Entry] = []
        self.failures: list[str] = []

    def run(self) -> None:
        scale, parts = self._options.scale, self._options.parts
        self._on(scale.pool, [name for name in parts if name not in ON_SMALL_POOL], "pool")
        self._on(scale.small_pool, [name for name in parts if name in ON_SMALL_POOL], "small-pool")

    def _on(self, pool: Pool, names: Sequence[str], folder: str) -> None:
        """Hold these parts on one stack."""
        if not names or self._late(*names):
            return
        options, home = self._options, self._options.folder / folder
        home.mkdir(parents=True)
        words = ["--model", str(self._model()), "--model-name", MODEL, "--device", options.scale.device]
        settings = {
            **options.scale.settings,
            "SAMOVAR_KV_PAGES": str(pool.pages),
            "SAMOVAR_STATES": str(pool.states),
        }
        try:
            with serving(home / "stack", words, settings, options.scale.start) as server:
                court = Court(options.scale, server, OutsideJudges(options.python, server.url, home), options.salt)
                for name in names:
                    if not self._late(name):
                        self._hold(name, PARTS[name], court)
        except StackEnded as error:
            self._failed(folder, error)

    def _late(self, *names: str) -> bool:
        late = time.monotonic() > self._deadline
        if late:
            print(f"-- left out, the time is over: {', '.join(names)}", flush=True)
            self.failures += names
        return late

    def _hold(self, name: str, part: Part, court: Court) -> None:
        begin = time.monotonic()
        print(f"-- {name}", flush=True)
        held: list[Entry] = []
        try:
            for entry in part(court):
                held.append(entry)
                print(f"   {_line(entry)}", flush=True)
        except (NoVerdict, TimeoutError, RuntimeError, httpx.HTTPError, OSError) as error:
            self._failed(name, error)
            print(court.server.log_end(), flush=True)
        print(f"   {name}: {time.monotonic() - begin:.1f} s", flush=True)
        self.entries += held
        if held and self._options.write:
            self._written(results.merge_entries(self._options.scale.topic, held, self._device))

    def _written(self, path: Path) -> None:
        if self._options.copy is not None:
            self._options.copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, self._options.copy)

    def _failed(self, name: str, error: Exception) -> None:
        self.failures.append(name)
        print(f"   {name} FAILED: {type(error).__name__}: {error}", flush=True)

    def _model(self) -> Path:
        options = self._options
        if options.model is not None:
            return options.model
        if options.scale.model == "small":
            return SMALL_MODEL
        folder = options.folder.parent / f"samovar-judged-27b-{options.layers}"
        if not (folder / "config.json").exists():
            begin = time.monotonic()
            checkpoint.write(folder, options.layers, options.scale.device)
            print(f"   weights written in {time.monotonic() - begin:.1f} s", flush=True)
        return folder


def missed(entry: Entry) -> bool:
    """Whether a number is on the wrong side of its limit."""
    if entry.limit is None:
        return False
    return entry.value > entry.limit if entry.name.endswith(_BEST_LOW) else entry.value < entry.limit


def _line(entry: Entry) -> str:
    limit = "" if entry.limit is None else f"  (limit {entry.limit:g}{': MISSED' if missed(entry) else ''})"
    return f"{entry.name:36} {entry.value:>10g} {entry.unit}{limit}"


def _gpu() -> str:
    """The card's name, without touching it."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip().splitlines()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return "unknown GPU"


def main(arguments: Sequence[str] = ()) -> None:
    options = _options(arguments)
    if not has_cache_pressure(options.python):
        print(
            f"{options.python} has no cache-pressure (Python 3.12 or newer): nothing judged; --judge-python names one"
        )
        return
    session = Session(options)
    session.run()
    print("\n".join(_line(entry) for entry in session.entries))
    wrong = [entry.name for entry in session.entries if missed(entry)]
    if session.failures or wrong:
        sys.exit(f"failed: {', '.join(session.failures) or 'none'}; limits missed: {', '.join(wrong) or 'none'}")


def _options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench judges", description=__doc__, formatter_class=_Plain)
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--only", metavar="A,B", help=f"default: all that the scale has, of {','.join(PARTS)}")
    parser.add_argument("--judge-python", type=Path, default=JUDGE_PYTHON, metavar="PATH")
    parser.add_argument("--folder", type=Path, help="for logs and results; must not exist")
    parser.add_argument(
        "--model", type=Path, help="instead of the scale's own; its tokenizer must be the small model's"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the 27B's shape; fewer: nothing is written")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="put the results there too")
    parser.add_argument("--salt", type=int, help="of all texts; default: the clock")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no part after so long")
    parser.add_argument("--dry", action="store_true", help="write nothing to docs/benchmarks")
    chosen = parser.parse_args(arguments)
    scale = SCALES[chosen.scale]
    there = [name for name in PARTS if scale.needles or not name.startswith("needle")]
    wanted = chosen.only.split(",") if chosen.only else there
    if unknown := [name for name in wanted if name not in there]:
        parser.error(f"--only: no {', '.join(unknown)} at this scale; there are {', '.join(there)}")
    if chosen.folder is not None and chosen.folder.exists():
        parser.error(f"{chosen.folder} exists")
    whole = chosen.layers == LAYERS and chosen.model is None
    return Options(
        scale,
        tuple(name for name in there if name in wanted),
        chosen.judge_python,
        chosen.folder or Path(tempfile.mkdtemp(prefix="samovar-judges-")) / "session",
        chosen.model,
        chosen.layers,
        chosen.copy,
        whole and not chosen.dry,
        chosen.salt if chosen.salt is not None else int(time.time()) % 10**8,
        chosen.seconds,
    )


class _Plain(argparse.RawDescriptionHelpFormatter):
    """The description as it is written above."""
