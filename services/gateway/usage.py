"""What an answer cost, beyond what any API has fields for: the same object in the usage of each."""

from msgspec import Struct

from services.gateway.miss import Miss
from services.gateway.renderer import Cost


class SamovarUsage(Struct, frozen=True, kw_only=True):
    """Tokens and seconds as in `protocol.generate.Usage`."""

    cached_device: int
    cached_host: int
    """Out of the kvstore's memory or its disk."""
    cached_disk: int
    """Those of `cached_host` that were on disk only."""
    computed_tokens: int
    preemptions: int
    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    decode_seconds: float
    missed: Miss | None
    """Why what was computed was not found; null where nothing could have been."""

    @classmethod
    def of(cls, cost: Cost) -> "SamovarUsage":
        usage = cost.usage
        return cls(
            cached_device=usage.cached_device,
            cached_host=usage.cached_host,
            cached_disk=usage.cached_disk,
            computed_tokens=usage.computed_tokens,
            preemptions=usage.preemptions,
            queue_seconds=round(usage.queue_seconds, 6),
            restore_seconds=round(usage.restore_seconds, 6),
            prefill_seconds=round(usage.prefill_seconds, 6),
            decode_seconds=round(usage.decode_seconds, 6),
            missed=cost.missed,
        )
