"""Which engines there are, as their heartbeats tell. Plain bookkeeping on the event loop's thread."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

from services.gateway.block_index import BlockIndex
from services.protocol.events import ENGINE_LOST_SECONDS, EngineLoad, EngineState, Heartbeat, ModelCard

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Engine:
    engine_id: str
    incarnation: str
    state: EngineState
    card: ModelCard | None
    load: EngineLoad
    progress: float
    detail: str
    heard: float
    """time.monotonic() seconds."""
    blocks: BlockIndex = field(default_factory=BlockIndex)
    assigned: set[str] = field(default_factory=set)
    """Requests given to it since its last heartbeat and not over yet, by their ids on the bus."""

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.card is not None


class Engines:
    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._models: set[str] = set()
        self._changed = asyncio.Event()

    def heard(self, beat: Heartbeat, now: float) -> bool:
        """Take a heartbeat. True when what ran on this engine before is lost: a new process, or its device failed."""
        engine = self._engines.get(beat.engine_id)
        lost = engine is not None and engine.incarnation != beat.incarnation
        if engine is None or lost:
            engine = Engine(beat.engine_id, beat.incarnation, "loading", None, beat.load, 0.0, "", now)
            self._engines[beat.engine_id] = engine
            self._pulse()
        if (engine.state, engine.card) != (beat.state, beat.card):
            log.info("engine %s is %s%s", beat.engine_id, beat.state, f": {beat.detail}" if beat.detail else "")
            lost = lost or beat.state == "failed"
            self._pulse()
        engine.state, engine.card, engine.load = beat.state, beat.card, beat.load
        engine.progress, engine.detail, engine.heard = beat.progress, beat.detail, now
        engine.assigned.clear()
        engine.blocks.announced(beat.last_event_id)
        if beat.card is not None:
            self._models.add(beat.card.name)
        return lost

    def expire(self, now: float) -> list[str]:
        """Forget the engines that were not heard for ENGINE_LOST_SECONDS; their ids."""
        silent = [e.engine_id for e in self._engines.values() if now - e.heard > ENGINE_LOST_SECONDS]
        for engine_id in silent:
            log.warning("engine %s was not heard for %g s", engine_id, ENGINE_LOST_SECONDS)
            del self._engines[engine_id]
        if silent:
            self._pulse()
        return silent

    def forgive(self, now: float) -> None:
        """Silence until now does not count: it was ours (no NATS, or this process did not get to run)."""
        for engine in self._engines.values():
            engine.heard = now

    def get(self, engine_id: str) -> Engine | None:
        return self._engines.get(engine_id)

    def alive(self, engine_id: str, incarnation: str) -> bool:
        """Whether what was given to this incarnation may still run there."""
        engine = self._engines.get(engine_id)
        return engine is not None and engine.incarnation == incarnation and engine.state != "failed"

    def all(self) -> list[Engine]:
        return list(self._engines.values())

    def serving(self, model: str) -> list[Engine]:
        """Ready engines of a model name."""
        return [e for e in self._engines.values() if e.ready and e.card is not None and e.card.name == model]

    def like(self, card: ModelCard) -> list[Engine]:
        """Ready engines that would go on with a stream of `card` as if it was theirs."""
        return [
            e
            for e in self._engines.values()
            if e.ready and e.card is not None and (e.card.name, e.card.fingerprint) == (card.name, card.fingerprint)
        ]

    def known(self, model: str) -> bool:
        return model in self._models

    def models(self) -> list[ModelCard]:
        """One card a name, by name. Of several engines it is that of the first id, with the smallest context."""
        cards: dict[str, ModelCard] = {}
        for engine in sorted(self._engines.values(), key=lambda e: e.engine_id):
            if engine.ready and engine.card is not None:
                first = cards.setdefault(engine.card.name, engine.card)
                if engine.card.fingerprint == first.fingerprint and engine.card.max_model_len < first.max_model_len:
                    cards[engine.card.name] = engine.card
        return [cards[name] for name in sorted(cards)]

    def missing(self) -> str:
        """What keeps us from serving, for people; empty when an engine is ready."""
        if any(e.ready for e in self._engines.values()):
            return ""
        if not self._engines:
            return "no engine has been heard"
        return "; ".join(self._describe(e) for e in sorted(self._engines.values(), key=lambda e: e.engine_id))

    @staticmethod
    def _describe(engine: Engine) -> str:
        text = f"engine {engine.engine_id} is {engine.state}"
        if engine.state == "loading":
            text += f" ({engine.progress:.0%})"
        return f"{text}: {engine.detail}" if engine.detail else text

    async def wait_change(self, timeout: float) -> None:
        """Until an engine appears, goes or changes its state, `timeout` seconds at most."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    def _pulse(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()
