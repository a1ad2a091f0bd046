"""The files of the disk tier: a lock, one data file, its journal. All that may wait for a disk; used on threads.

One data file in which objects take extents, as they do in the arena, and not a file for each object or segments that
are appended to: of a million objects a folder of files takes minutes to read back, and segments must be copied around
to get at the room between what is still wanted. So the disk gives up just the object that is worth least, by the same
allocator and the same rule as the arena, nothing is written twice, and SIZE bounds it to the byte. What is paid: an
object may lie in several pieces, a file that has been large stays large, and bytes of what was forgotten stay in it
until others take their place.

An object is valid only if its record in the journal is, and its bytes have the checksum that stands there. Its bytes
are synced before its record is written, so that a record names bytes that reached the disk; one that lost them all the
same (a disk that lies, a Forget that was lost) is found when it is read.
"""

import fcntl
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from services.kvstore.copying import CHUNK_BYTES, copy
from services.kvstore.disk_space import DiskSpace
from services.kvstore.extents import UNIT, rounded
from services.kvstore.journal import VERSION, Forget, Journal, Put, sync_folder
from services.kvstore.stored import Stored
from services.protocol.kv import Key
from services.settings import SettingsError

STEM = f"samovar-kv-{VERSION}"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """What was found at start."""

    objects: tuple[Stored, ...]
    torn: int
    """Damaged stretches of the journal, and objects that it names and that cannot be right."""


class DiskFiles:
    """Calls that write (`write`, `rewrite`) come from one thread at a time; `read` may run beside them."""

    def __init__(self, space: DiskSpace) -> None:
        """Makes what is missing, and locks the folder. Raises SettingsError."""
        self._space = space
        folder = space.folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SettingsError(f"SAMOVAR_KV_DISK={folder}: cannot be used: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._say_what_is_left_alone()
            self._data = self._open_data()
            self._journal = Journal(folder / f"{STEM}.journal", space.journal_bytes)
            sync_folder(folder)
        except BlockingIOError:
            os.close(self._lock)
            raise SettingsError(
                f"SAMOVAR_KV_DISK={folder}: another kvstore has this folder; stop it or set another folder"
            ) from None
        except OSError as error:
            os.close(self._lock)
            raise SettingsError(f"SAMOVAR_KV_DISK={folder}: cannot be used: {error}") from None

    @property
    def journal_room(self) -> int:
        """Bytes that may be appended to the journal before it must be rewritten."""
        return self._space.journal_bytes - self._journal.size

    def read_back(self, now: float) -> Kept:
        """All objects that the journal names, not yet verified but in extents that are there and overlap no other
        object's. `now` is the present time on the clock of `Stored.used`."""
        puts: dict[Key, tuple[int, Put]] = {}
        torn = number = 0
        for number, record in enumerate(self._journal.records()):
            match record:
                case None:
                    torn += 1
                case Put():
                    puts[record.key] = (number, record)
                case Forget():
                    for key in record.keys:
                        puts.pop(key, None)
        if torn and number + 1 == torn:
            self._set_aside()
        end = min(os.fstat(self._data).st_size, self._space.data_bytes)
        sound = [item for item in puts.values() if _is_sound(item[1], end)]
        torn += len(puts) - len(sound)
        lag = now - time.time()
        return Kept(tuple(_stored(put, min(now, put.used + lag)) for put in _disjoint(sound)), torn)

    def write(self, arena: int, pairs: Sequence[tuple[Stored, Stored]], forgotten: Sequence[Key], now: float) -> None:
        """Write objects of the arena to the extents that their copies have here, then their records; set the copies'
        checksums. `forgotten` are keys whose extents these may be. Durable on return; raises OSError."""
        if forgotten:
            self._journal.append([Forget(tuple(forgotten))])
        if not pairs:
            return
        buffer = bytearray(CHUNK_BYTES)
        for source, target in pairs:
            target.checksum = copy(arena, source.extents, self._data, target.extents, buffer)
        os.fdatasync(self._data)
        for _, target in pairs:
            for extent in target.extents:  # it is in the arena, or not wanted: no second copy in the page cache
                os.posix_fadvise(self._data, extent.offset, extent.length, os.POSIX_FADV_DONTNEED)
        self._journal.append(_puts([target for _, target in pairs], now))

    def rewrite(self, objects: Iterable[Stored], now: float) -> None:
        """Let the journal say this and nothing else. Raises OSError."""
        self._journal.rewrite(_puts(objects, now))

    def read(self, arena: int, pairs: Sequence[tuple[Stored, Stored]]) -> list[bool]:
        """Read objects from here into the arena's extents of their copies: which of them are what they were."""
        buffer = bytearray(CHUNK_BYTES)
        return [self._read(arena, source, target, buffer) for source, target in pairs]

    def _read(self, arena: int, source: Stored, target: Stored, buffer: bytearray) -> bool:
        try:
            return copy(self._data, source.extents, arena, target.extents, buffer) == source.checksum
        except OSError as error:
            log.warning("an object of %d bytes cannot be read from disk: %s", source.length, error)
            return False

    def close(self) -> None:
        """Also gives up the lock."""
        self._journal.close()
        os.close(self._data)
        os.close(self._lock)

    def _open_data(self) -> int:
        path = self._space.folder / f"{STEM}.blocks"
        data = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(data).st_size > self._space.data_bytes:  # SIZE is less than it was
            os.ftruncate(data, self._space.data_bytes)
        return data

    def _say_what_is_left_alone(self) -> None:
        for path in sorted(self._space.folder.glob("samovar-kv-*")):
            if not path.name.startswith(f"{STEM}."):
                log.warning("%s is of another version of Samovar and left alone: delete it to have its room back", path)

    def _set_aside(self) -> None:
        """A journal without a good record is perhaps not ours."""
        folder = self._space.folder
        aside = folder / f"samovar-kv-unreadable-{int(time.time())}"
        log.warning("the journal in %s cannot be read: set aside as %s", folder, aside)
        with suppress(OSError):
            os.link(folder / f"{STEM}.journal", aside)
        with suppress(OSError):
            self._journal.rewrite(())


def _puts(objects: Iterable[Stored], now: float) -> Iterable[Put]:
    lag = now - time.time()
    for stored in objects:
        yield Put(
            stored.key,
            stored.parent,
            stored.fingerprint,
            stored.length,
            stored.cost,
            stored.chance,
            stored.shared,
            stored.used - lag,
            stored.checksum,
            stored.extents,
        )


def _stored(put: Put, used: float) -> Stored:
    return Stored(
        put.key,
        put.parent,
        put.fingerprint,
        put.length,
        put.cost,
        put.chance,
        used,
        shared=put.shared,
        extents=put.extents,
        checksum=put.checksum,
    )


def _is_sound(put: Put, end: int) -> bool:
    """Whether all of it lies within `end` bytes of data."""
    fits = all(e.offset >= 0 and e.offset % UNIT == 0 and 0 < e.length <= end - e.offset for e in put.extents)
    whole = sum(e.length for e in put.extents) == put.length > 0
    return fits and whole and math.isfinite(put.cost) and math.isfinite(put.used) and 0 < put.chance <= 1


def _disjoint(puts: Sequence[tuple[int, Put]]) -> list[Put]:
    """The newer of each two that overlap: the older one's Forget was lost."""
    dead: set[int] = set()
    last_end, last = 0, -1
    spans = sorted((e.offset, number, e.offset + rounded(e.length)) for number, put in puts for e in put.extents)
    for begin, number, end in spans:
        if number in dead:
            continue
        if begin < last_end and number != last:
            dead.add(min(number, last))
            if last > number:
                continue
        last_end, last = end, number
    return [put for number, put in puts if number not in dead]
