"""Why no token stream came of a request. The messages are for people."""

from services.protocol.generate import RejectReason


class EngineError(Exception):
    """Base of the three below; raised by EngineClient before a stream exists, never by a stream."""


class EngineRejected(EngineError):
    """An engine said no; of several that did, the one that may say yes soonest."""

    def __init__(self, reason: RejectReason, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        """Seconds."""


class NoEngine(EngineError):
    """Nobody serves this model just now (no NATS, none started, still loading, lost). A 503."""


class RequestTooLarge(EngineError):
    """The prompt does not fit into one NATS message. A 413."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"The request takes {size} bytes on the message bus, which carries {limit} at most (max_payload of NATS)."
        )
        self.size = size
        self.limit = limit
