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
_FILES = ("--copy", "--folder", "--judge-python", "--model", "--trace")


def write(topic: str, measured: dict[str, Any]) -> Path:
    """Replace docs/benchmarks/`topic`.json."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{topic}.json"
    entry = {
        "command": _command(),
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
    return _write_list(topic, [_measured(entry, device) for entry in entries])


def merge_entries(topic: str, entries: Sequence[Entry], device: str = "") -> Path:
    """The same, but what the file has under other names stays, with the command and date that measured it. Entries of
    a name that is there already take its place; new ones follow in their order."""
    merged = {known["name"]: known for known in read_entries(topic)}
    merged.update((entry.name, _measured(entry, device)) for entry in entries)
    return _write_list(topic, list(merged.values()))


def read_entries(topic: str) -> list[dict[str, Any]]:
    """Of docs/benchmarks/`topic`.json: the fields of Entry, and command, gpu and date. Empty where there is no file."""
    path = FOLDER / f"{topic}.json"
    return json.loads(path.read_text()) if path.exists() else []


def _measured(entry: Entry, device: str) -> dict[str, Any]:
    return {
        **asdict(entry),
        "command": _command(),
        "gpu": device or f"none ({os.cpu_count()} cores, {_processor()})",
        "date": date.today().isoformat(),
    }


def _command() -> str:
    """Without options that say where other files go: paths of this machine."""
    words = iter(sys.argv[1:])
    kept = [word for word in words if word not in _FILES or next(words, None) is None]
    return " ".join(("python -m bench", *kept))


def _write_list(topic: str, entries: Sequence[dict[str, Any]]) -> Path:
    """Replaced in one step: a run may be cut at any time."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{topic}.json"
    new = path.with_suffix(".json.new")
    new.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
    new.replace(path)
    return path


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())
