"""The programs of PyPI's `cache-pressure`, each a process of an interpreter that has it (Python 3.12 or newer)."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = {
    "cache-pressure": "cache_pressure.core",
    "agent-sim": "cache_pressure.agent_sim",
    "abort-sim": "cache_pressure.abort_sim",
    "needle-test": "cache_pressure.needle",
    "perf-sim": "cache_pressure.perf_sim",
}
MODEL = "samovar-judged"
"""The name under which the stack serves, so that no judge has to ask."""


class NoVerdict(RuntimeError):
    """A judge wrote no result; with the end of what it said."""


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: bool
    """By its own standards."""
    seconds: float
    result: dict[str, Any]
    """What it wrote with `--output`."""


class OutsideJudges:
    def __init__(self, python: Path, url: str, folder: Path) -> None:
        """`python`: an interpreter that has `cache-pressure`. What the judges say and write goes to `folder`."""
        self._python, self._url, self._folder = python, url, folder
        self._count = 0

    def ask(self, program: str, options: Mapping[str, object], seconds: float) -> Verdict:
        """Raises NoVerdict, also when it takes longer than `seconds`."""
        self._count += 1
        out = self._folder / f"{self._count:02}-{program}.json"
        log = out.with_suffix(".log")
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
        command = [str(self._python), "-m", MODULES[program], f"--base-url={self._url}/v1", f"--model={MODEL}"]
        begin = time.monotonic()
        with log.open("w") as said:
            try:
                code = subprocess.run(
                    [*command, f"--output={out}", *words],
                    env={**os.environ, "NO_PROXY": "127.0.0.1", "PYTHONUNBUFFERED": "1"},
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                ).returncode
            except subprocess.TimeoutExpired:
                raise NoVerdict(f"{program} took longer than {seconds:g} s: {_end(log)}") from None
        taken = time.monotonic() - begin
        print(f"   {program} {' '.join(words)}: {taken:.1f} s; {log}", flush=True)
        if not out.exists():
            raise NoVerdict(f"{program} ended with {code}: {_end(log)}")
        return Verdict(code == 0, taken, json.loads(out.read_text()))


def has_cache_pressure(python: Path) -> bool:
    """Whether this interpreter runs and has the judges."""
    try:
        done = subprocess.run([str(python), "-c", "import cache_pressure.agent_sim"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
