"""Tells who asks which contexts are cached."""

import asyncio
import logging
import queue

from nats.aio.msg import Msg

from services.bus import Bus
from services.engine.mailbox import Inspect, Message, Sight, StateLoad
from services.protocol import codec
from services.protocol.events import CachedRun, CacheTree, EngineLoad
from services.protocol.hashing import BLOCK_TOKENS

log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.5
RUN_BYTES = 256
"""Of a run in a message, with its names and a few checkpoints; what is cut by this estimate is said."""


class TreeAnswers:
    """On the event loop's thread."""

    def __init__(self, bus: Bus, engine_id: str) -> None:
        self._bus = bus
        self._engine_id = engine_id
        self._inbox: queue.SimpleQueue[Message] | None = None
        self._waiting: list[asyncio.Future[CacheTree]] = []

    def attach(self, inbox: "queue.SimpleQueue[Message]") -> None:
        """The core is there to be asked."""
        self._inbox = inbox

    def seen(self, sight: Sight, load: EngineLoad, states: StateLoad) -> None:
        """The core's answer."""
        runs = sight.runs
        room = max(0, (self._bus.max_payload - 1024) // RUN_BYTES)
        tree = CacheTree(
            engine_id=self._engine_id,
            runs=newest(runs, room),
            page_bytes=sight.page_bytes,
            state_bytes=sight.state_bytes,
            pages_total=load.pages_total,
            pages_held=load.pages_total - load.pages_free,
            pages_cached=sum(run.device - run.held for run in runs) // BLOCK_TOKENS,
            states_total=states.total,
            states_held=states.held,
            states_cached=states.checkpoints,
            left_out=max(0, len(runs) - room),
        )
        for future in self._waiting:
            if not future.done():
                future.set_result(tree)
        self._waiting.clear()

    async def answer(self, msg: Msg) -> None:
        """Reply to a request; no reply while the model is loading or the core is in a long step."""
        if self._inbox is None:
            return
        future: asyncio.Future[CacheTree] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._inbox.put(Inspect())
        try:
            tree = await asyncio.wait_for(future, ANSWER_SECONDS)
        except TimeoutError:
            log.info("no tree of the cache within %g s: the core is in a long step", ANSWER_SECONDS)
            return
        await self._bus.respond(msg, codec.encode(tree))


def newest(runs: tuple[CachedRun, ...], room: int) -> tuple[CachedRun, ...]:
    """Those used last, with all that lie before them in their contexts, in the same order."""
    if len(runs) <= room:
        return runs
    parents = {run.name: run.parent for run in runs}
    kept: set[bytes] = set()
    for run in sorted(runs, key=lambda run: run.idle_seconds):
        way: list[bytes] = []
        name = run.name
        while name and name not in kept:
            way.append(name)
            name = parents.get(name, b"")
        if len(kept) + len(way) <= room:
            kept.update(way)
    return tuple(run for run in runs if run.name in kept)
