"""Which gateways are alive: requests of one that fell silent are nobody's any more."""

from services.protocol.events import GATEWAY_LOST_SECONDS


class GatewayWatch:
    """Times are time.monotonic() seconds. On the event loop's thread."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}

    def heard(self, gateway_id: str, now: float) -> None:
        """A heartbeat or a request of this gateway."""
        self._heard[gateway_id] = now

    def forgive(self, now: float) -> None:
        """Silence until now does not count: it was ours (no NATS, or this process did not get to run)."""
        for gateway_id in self._heard:
            self._heard[gateway_id] = now

    def expire(self, now: float) -> list[str]:
        """Forget the gateways that were not heard for GATEWAY_LOST_SECONDS; their ids."""
        lost = [gateway_id for gateway_id, heard in self._heard.items() if now - heard > GATEWAY_LOST_SECONDS]
        for gateway_id in lost:
            del self._heard[gateway_id]
        return lost
