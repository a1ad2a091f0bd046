"""What the engine publishes: one TokenBatch a step and gateway, and the block events.

One task sends; while it waits for the socket, later steps merge into the next message. What cannot be sent (NATS is
away) is dropped: gateways fill gaps from the replay buffer and the router's index from a snapshot. On the event loop.
"""

import asyncio
import logging

from services.bus import Bus
from services.protocol import codec, subjects
from services.protocol.events import BlockEvents
from services.protocol.generate import TokenBatch, TokenDelta

log = logging.getLogger(__name__)


class Outbox:
    def __init__(self, bus: Bus, engine_id: str) -> None:
        self._bus = bus
        self._engine_id = engine_id
        self._deltas: dict[str, list[TokenDelta]] = {}
        self._events: list[BlockEvents] = []
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def deltas(self, gateway_id: str, delta: TokenDelta) -> None:
        self._deltas.setdefault(gateway_id, []).append(delta)
        self._wake()

    def event(self, event: BlockEvents) -> None:
        self._events.append(event)
        self._wake()

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._work.wait()
            self._work.clear()
            deltas, self._deltas = self._deltas, {}
            events, self._events = self._events, []
            try:
                for gateway_id, of_gateway in deltas.items():
                    for message in token_messages(self._engine_id, of_gateway, self._bus.max_payload):
                        await self._bus.publish(subjects.tokens(gateway_id), message)
                for event in events:
                    await self._bus.publish(subjects.BLOCK_EVENTS, codec.encode(event))
            except Exception:
                log.exception("publishing failed; gateways will ask again")
            if not self._work.is_set():
                self._idle.set()

    async def flush(self) -> None:
        """Until everything so far was handed to the socket."""
        await self._idle.wait()

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()


def token_messages(engine_id: str, deltas: list[TokenDelta], limit: int) -> list[bytes]:
    """`deltas` as one encoded TokenBatch, or as several that each have `limit` bytes at most."""
    message = codec.encode(TokenBatch(engine_id, tuple(deltas)))
    if len(message) <= limit:
        return [message]
    if len(deltas) > 1:
        half = len(deltas) // 2
        return token_messages(engine_id, deltas[:half], limit) + token_messages(engine_id, deltas[half:], limit)
    delta = deltas[0]
    half = len(delta.tokens) // 2
    if half == 0:
        raise ValueError(f"max_payload of {limit} bytes is too small for a single token")
    first = TokenDelta(delta.request_id, delta.offset, delta.tokens[:half], cached=delta.cached)
    rest = TokenDelta(
        delta.request_id, delta.offset + half, delta.tokens[half:], delta.finish, delta.usage, delta.error
    )
    return token_messages(engine_id, [first], limit) + token_messages(engine_id, [rest], limit)
