"""What the engine client has lived through."""

from dataclasses import dataclass


@dataclass(slots=True)
class ClientCounters:
    """Since the start of the process; the gateway's metrics read them. Those of the bus are in `Bus.counters`."""

    gaps: int = 0
    """Times that tokens were found missing."""
    gaps_filled: int = 0
    """Times that a Resume brought what was missing."""
    duplicates: int = 0
    """Deltas with tokens that were here already."""
    resumes: int = 0
    """Resume requests sent."""
    migrations: int = 0
    """Requests that another (or the restarted) engine went on with."""
    migrations_failed: int = 0
    """Streams that ended in an error since nobody went on with them."""
    engines_lost: int = 0
    stray_deltas: int = 0
    """Deltas of requests that nobody reads any more (each is answered by a Cancel)."""
