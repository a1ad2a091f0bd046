"""Arenas over anonymous memory, as the kvstore hands them over."""

import os

from services.engine.cache.arena import Arena


def arena(size: int, fill: int = 0) -> Arena:
    fd = os.memfd_create("test-arena")
    os.ftruncate(fd, size)
    made = Arena(fd, size)
    made.view[:] = bytes([fill]) * size
    return made
