"""The engine's mapping of the kvstore's memory."""

import mmap
import os


class Arena:
    """A shared mapping of the memfd that the kvstore handed over. No torch: `transfer.py` makes tensors of it.

    Outlives the kvstore process: bytes that were leased stay readable until the last user of the mapping lets go.
    Two connections (a restarted kvstore) give two Arenas; objects are compared by identity.
    """

    def __init__(self, fd: int, size: int) -> None:
        """Maps `size` bytes of `fd`, which is closed in any case. Raises OSError when it cannot be mapped."""
        try:
            self.size = size
            self.view = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
        finally:
            os.close(fd)
