"""`samovar pack` and `samovar plan`: the engine's tools as child processes, since this one must do without torch."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal

MODULES = {"pack": "services.engine.weights.pack", "plan": "services.engine.plan"}


def run(tool: Literal["pack", "plan"], arguments: Sequence[str]) -> int:
    """Returns the child's exit code; 128 + n where signal n ended it."""
    # As services.engine.assembly sets it for the engine: threads that spin slow all others down.
    environ = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    child = subprocess.Popen([sys.executable, "-m", MODULES[tool], *arguments], env=environ)
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            continue  # the terminal has told the child too
