"""Where measurements go: one JSON file a topic under docs/benchmarks/, each with its command, machine and date."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


def write(topic: str, measured: dict[str, Any]) -> Path:
    """Replace docs/benchmarks/`topic`.json."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{topic}.json"
    entry = {
        "command": "python -m bench " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {_processor()}, Python {platform.python_version()}",
        "measured": measured,
    }
    path.write_text(json.dumps(entry, indent=1) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class Entry:
    """One number of a table."""

    name: str
    """From the general to the special, `linear/nvfp4/34816x5120/m1`."""
    value: float
    unit: str
    ratio: float | None = None
    """The share of the limit, or of what the number is compared with."""
    limit: float | None = None
    """What the number must reach, or must not exceed, in `unit`."""


def write_entries(topic: str, entries: Sequence[Entry], device: str = "") -> Path:
    """Replace docs/benchmarks/`topic`.json by a list of entries with command, device and date. `device`: what was
    measured on; empty: this machine's processor."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{topic}.json"
    common = {
        "command": "python -m bench " + " ".join(sys.argv[1:]),
        "gpu": device or f"none ({os.cpu_count()} cores, {_processor()})",
        "date": date.today().isoformat(),
    }
    lines = [json.dumps({**asdict(entry), **common}) for entry in entries]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return path


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())
