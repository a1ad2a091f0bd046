"""How much memory this machine, or the container that we run in, can give to the arena."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    bytes: int
    source: str
    """What sets the limit, for an error message."""


def memory_limit(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryLimit:
    """The lower of MemAvailable and the memory limit of our cgroup (v2 or v1) or of any cgroup above it.

    A cgroup counts with its limit, not with what is left of it: the pages of a memfd are charged to whoever touches
    them first, which is the engine, so that what we use ourselves says little about the arena.
    """
    limits = [MemoryLimit(_available(proc), "memory available on this machine")]
    limits += [MemoryLimit(limit, "memory limit of this container") for limit in _cgroup_limits(proc, cgroup)]
    return min(limits, key=lambda limit: limit.bytes)


def _available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024  # meminfo's "kB" are KiB
    raise OSError(f"{proc}/meminfo has no MemAvailable")


def _cgroup_limits(proc: Path, cgroup: Path) -> Iterator[int]:
    """Limits in bytes, from our own cgroup up to the root of what we see. Inside a container the path of
    /proc/self/cgroup may be the host's: then only its root exists here, and that is the container's own."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroup, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroup / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            try:
                text = (root / folder / name).read_text().strip()
            except OSError:
                continue  # not visible from here, or the root cgroup, which has no limit
            if text != "max":
                yield int(text)
