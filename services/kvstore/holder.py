"""What one connection holds."""

from dataclasses import dataclass, field

from services.kvstore.stored import Stored
from services.protocol.kv import Key


@dataclass(slots=True, eq=False)
class Holder:
    """Made by the server, kept by the index."""

    name: str
    fingerprint: str
    leases: dict[int, list[Stored]] = field(default_factory=dict)
    reserved: dict[Key, Stored] = field(default_factory=dict)
