"""Gets a client from npm, by whatever registry the user's npm is set to."""

import shutil
import subprocess
from pathlib import Path

from tests.frontends.client import Client

SECONDS = 600


class NotInstalled(RuntimeError):
    """The message is for people."""


def installed(client: Client, cache: Path) -> Path:
    """The client's program in its pinned version; asks npm only where `cache` has it not. Raises NotInstalled."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("npm is not installed: it comes with Node.js 20 or newer")
    folder = cache / f"{client.name}-{client.version}"
    program = folder / "node_modules" / ".bin" / client.program
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    wanted = f"{client.package}@{client.version}"
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode or not program.exists():
        raise NotInstalled(f"npm install {wanted} ended with {done.returncode}:\n{done.stderr}")
    return program
