"""What a GPU has given away, as its driver counts it."""

import subprocess


def used_bytes() -> int | None:
    """Of all processes on the first GPU; None where nvidia-smi does not say. Makes no CUDA context."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
        return int(told[0]) * 2**20
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
