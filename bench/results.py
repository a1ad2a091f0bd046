"""Where measurements go: one JSON file a topic under docs/benchmarks/, each with its command, machine and date."""

import json
import os
import platform
import sys
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


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())
