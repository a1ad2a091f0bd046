"""The store's memory: one memfd, never mapped here, whose descriptor goes to every client."""

import fcntl
import os

from services.kvstore.extents import UNIT
from services.kvstore.memory import MemoryLimit
from services.settings import ByteSize, SettingsError


class Arena:
    """`size` bytes of anonymous shared memory. Pages are taken as clients write to them, and kept until the end.

    A memfd and not /dev/shm: containers give the latter 64 MB. Its size is sealed, since a client that shrank it would
    kill all others with SIGBUS.
    """

    def __init__(self, size: int) -> None:
        """`size` must be a multiple of UNIT. Raises OSError when the system gives no memfd."""
        self.size = size
        self.fd = os.memfd_create("samovar-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Let go of the memory; clients keep what they have mapped."""
        os.close(self.fd)


def arena_size(asked: int, limit: MemoryLimit) -> int:
    """The bytes to give to the arena: `asked`, rounded down to whole units.

    Raises SettingsError when that is nothing, or more than the machine has: taken as it fills, such an arena would
    end days later in the kernel's OOM killer.
    """
    size = asked // UNIT * UNIT
    if size == 0:
        raise SettingsError(f"SAMOVAR_KV_ARENA={asked}: the arena needs {UNIT} bytes or more")
    if size > limit.bytes:
        fitting = ByteSize(max(1, limit.bytes * 3 // 4 // 2**20) * 2**20)
        raise SettingsError(
            f"SAMOVAR_KV_ARENA={ByteSize(asked)} is more than the {limit.bytes / 2**30:.2f} GiB of {limit.source}: "
            f"set SAMOVAR_KV_ARENA to less, such as {fitting}"
        )
    return size
