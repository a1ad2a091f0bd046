"""`samovar pack`: the engine's pack tool as a child process, since this one must do without torch."""

import os
import subprocess
import sys
from collections.abc import Sequence

MODULE = "services.engine.weights.pack"


def run(arguments: Sequence[str]) -> int:
    """Returns the child's exit code; 128 + n where signal n ended it."""
    # As services.engine.assembly sets it for the engine: threads that spin slow all others down.
    environ = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    child = subprocess.Popen([sys.executable, "-m", MODULE, *arguments], env=environ)
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            continue  # the terminal has told the child too
