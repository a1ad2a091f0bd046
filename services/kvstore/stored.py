"""One object of a tier: of the arena or of the disk."""

from dataclasses import dataclass

from services.protocol.kv import Extent, Key

_STATE = b"/state/"
_STATE_END = len(_STATE) + 8


@dataclass(slots=True, eq=False)
class Stored:
    """An object that is reserved or committed, or that was forgotten while something still pins its bytes."""

    key: Key
    parent: Key
    """Empty, or the key of the object before it, which need not be in the tier."""
    fingerprint: str
    """Of the client that reserved it."""
    length: int
    """Bytes."""
    cost: float
    """Seconds to compute it again."""
    chance: float
    """That it is asked for again, as seen at its last use."""
    used: float
    """When, on the clock of all `now`."""
    shared: bool = False
    """Two contexts have gone on from it, at some time at once: its chance counts as `worth.SHARED` from then on."""
    extents: tuple[Extent, ...] = ()
    checksum: int = 0
    """CRC-32 of its bytes; of objects on disk only."""
    score: float = 0.0
    """See `worth.score`; brought up to date by the index."""
    committed: bool = False
    kept: bool = True
    """In the index: its key can be found, and it counts as a child of its parent."""
    pins: int = 0
    """Leases on it, those of ended connections included until their grace is over, and copies under way."""
    saved: bool = False
    """The tier below has it too, or is being given it."""

    @property
    def is_state(self) -> bool:
        """A checkpoint (`kv.state_key`) of a recurrent state: nothing goes on from it, and it is no other context."""
        return self.key[-_STATE_END:].startswith(_STATE)
