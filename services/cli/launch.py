"""The first program of every child: ask the kernel to end this process with its parent, then become the service.

Run as a plain script by an isolated interpreter (`python -IS launch.py PARENT_PID PROGRAM ARGUMENT...`), so it imports
nothing of ours. It exists because the wish must be made in the child: `preexec_fn` would run Python between fork and
exec, which may deadlock while the parent has threads. The wish survives exec and the process keeps its pid. Only Linux
has it; elsewhere a `kill -9` of the parent leaves the children running.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != parent:  # it died before the wish was made
            sys.exit(1)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
