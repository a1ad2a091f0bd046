"""Tells routers which blocks are in the device cache: numbered events as they change, a snapshot when asked."""

import asyncio
import logging
import queue

from nats.aio.msg import Msg

from services.bus import Bus
from services.engine.mailbox import Message, Snapshot
from services.engine.outbox import Outbox
from services.protocol import codec
from services.protocol.events import BlockEvents, BlockSnapshot

log = logging.getLogger(__name__)

BLOCKS_PER_EVENT = 8192
"""34 bytes each: 280 KB, within NATS's default message."""
SNAPSHOT_SECONDS = 1.5


class BlockFeed:
    """On the event loop's thread."""

    def __init__(self, bus: Bus, outbox: Outbox, engine_id: str, incarnation: str) -> None:
        self._bus = bus
        self._outbox = outbox
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._inbox: queue.SimpleQueue[Message] | None = None
        self._waiting: list[asyncio.Future[tuple[int, tuple[bytes, ...]]]] = []
        self.event_id = 0
        """Of the last event, whether it could be sent or not: a listener that missed it sees the gap."""

    def attach(self, inbox: "queue.SimpleQueue[Message]") -> None:
        """The core is there to be asked for snapshots."""
        self._inbox = inbox

    def changed(self, stored: tuple[bytes, ...], removed: tuple[bytes, ...]) -> None:
        """Removed ones go first where a message must be split: a name may leave and enter again in one step."""
        if len(stored) + len(removed) <= BLOCKS_PER_EVENT:
            if stored or removed:
                self._event(stored, removed)
            return
        for start in range(0, len(removed), BLOCKS_PER_EVENT):
            self._event((), removed[start : start + BLOCKS_PER_EVENT])
        for start in range(0, len(stored), BLOCKS_PER_EVENT):
            self._event(stored[start : start + BLOCKS_PER_EVENT], ())

    def snapshot(self, blocks: tuple[bytes, ...]) -> None:
        """The core's answer, true as of all changes so far."""
        for future in self._waiting:
            if not future.done():
                future.set_result((self.event_id, blocks))
        self._waiting.clear()

    async def answer(self, msg: Msg) -> None:
        """Reply to a request for a snapshot; no reply when the core is in a long step: the asker comes again."""
        event_id, blocks = self.event_id, ()
        if self._inbox is not None:
            future: asyncio.Future[tuple[int, tuple[bytes, ...]]] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            self._inbox.put(Snapshot())
            try:
                event_id, blocks = await asyncio.wait_for(future, SNAPSHOT_SECONDS)
            except TimeoutError:
                log.info("no block snapshot within %g s: the core is in a long step", SNAPSHOT_SECONDS)
                return
        # 34 bytes a block. The router's index is a hint: what does not fit into a message is left out.
        room = max(0, (self._bus.max_payload - 1024) // 36)
        if len(blocks) > room:
            log.warning("a snapshot of %d blocks is cut to %d (max_payload of NATS)", len(blocks), room)
        reply = BlockSnapshot(
            engine_id=self._engine_id, incarnation=self._incarnation, event_id=event_id, blocks=blocks[:room]
        )
        await self._bus.respond(msg, codec.encode(reply))

    def _event(self, stored: tuple[bytes, ...], removed: tuple[bytes, ...]) -> None:
        self.event_id += 1
        self._outbox.event(
            BlockEvents(
                engine_id=self._engine_id,
                incarnation=self._incarnation,
                event_id=self.event_id,
                stored=stored,
                removed=removed,
            )
        )
