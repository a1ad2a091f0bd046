"""The setting of the disk tier: which folder, how many bytes."""

from dataclasses import dataclass
from pathlib import Path

from services.kvstore.extents import UNIT
from services.settings import ByteSize, SettingsError

LEAST_BYTES = 16 * 2**20
JOURNAL_SHARE = 64
"""A journal may take this part of the room, and there may be two while one is rewritten."""
RECORD_BYTES = 384
"""That an object takes in the journal at most, as a rule; a record that names many extents may be larger."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    folder: Path
    size: int
    """Bytes that all files together may have."""

    @classmethod
    def parse(cls, text: str) -> "DiskSpace":
        """Of `FOLDER:SIZE`. Raises SettingsError that says what to write."""
        folder, _, size = text.rpartition(":")
        wanted = f"SAMOVAR_KV_DISK={text!r}: write FOLDER:SIZE, like /var/lib/samovar/kv:64GiB"
        if not folder.strip():
            raise SettingsError(wanted)
        try:
            room = ByteSize.parse(size)
        except ValueError as error:
            raise SettingsError(f"{wanted} ({error})") from None
        if room < LEAST_BYTES:
            raise SettingsError(f"{wanted} (the size must be {ByteSize(LEAST_BYTES)} or more)")
        return cls(Path(folder.strip()).expanduser().absolute(), int(room))

    @property
    def journal_bytes(self) -> int:
        """Of one journal at most."""
        return self.size // JOURNAL_SHARE

    @property
    def data_bytes(self) -> int:
        """For the bytes of objects, a multiple of UNIT."""
        return (self.size - 2 * self.journal_bytes) // UNIT * UNIT

    @property
    def most_objects(self) -> int:
        """So that the journal of all of them takes half of its room: it is not rewritten all the time."""
        return self.journal_bytes // 2 // RECORD_BYTES
