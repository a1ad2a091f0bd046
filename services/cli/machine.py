"""What this machine offers: memory, ports, GPUs."""

import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_NVIDIA_SMI = ("--query-gpu=uuid", "--format=csv,noheader")


class PortTaken(Exception):
    """Another program listens there."""


class AddressUnusable(Exception):
    """One cannot listen there; the message says why."""


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be used without swapping: of the machine or, if that is less, of the container."""
    available = psutil.virtual_memory().available
    for limit_file, used_file in _CGROUP_FILES:
        try:
            limit, used = int((cgroup / limit_file).read_text()), int((cgroup / used_file).read_text())
        except (OSError, ValueError):  # no such cgroup version, or no limit ("max")
            continue
        available = min(available, max(limit - used, 0))
    return available


def hold_port() -> socket.socket:
    """A loopback TCP port that is ours until the socket is closed: the system gives it to nobody who asks for a free
    one, also not as the near end of a connection. Who is told its number can listen there, with SO_REUSEADDR as all
    servers set it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def check_port(host: str, port: int) -> None:
    """Raises PortTaken or AddressUnusable when one cannot listen on host:port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressUnusable(f"{host!r} is no address of this machine ({error.strerror})") from None
    refused: OSError | None = None
    usable = False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
                usable = True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken from None
            refused = error  # of several addresses (localhost: IPv4 and IPv6) one may be switched off
    if not usable and refused is not None:
        raise AddressUnusable(f"cannot listen on {host} port {port} ({refused.strerror})")


def gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The CUDA devices that this user allows, each as CUDA_VISIBLE_DEVICES names it (by UUID where we ask NVIDIA's
    tool, since CUDA and the driver number devices differently)."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    tool = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if tool is None:
        return ()
    try:
        told = subprocess.run((tool, *_NVIDIA_SMI), capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in told.stdout.splitlines() if line.strip())


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
