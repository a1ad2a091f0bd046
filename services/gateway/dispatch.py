"""Offers a request to engines, best first, until one accepts: the first time and at every resumption alike."""

import asyncio
import time
from collections.abc import Iterable

import msgspec

from services.bus import Bus, MessageTooLarge, NoListener, NoReply, NotConnected
from services.gateway.engines import Engine
from services.gateway.router import Candidate, choose
from services.gateway.token_stream import TokenStream
from services.protocol import codec, hashing, subjects
from services.protocol.generate import Accepted, Cancel, Rejected, pack_ids

ACCEPT_SECONDS = 3.0
"""For an engine's answer; asked twice, since a request or its answer may get lost and asking again is harmless."""

HASH_INLINE_TOKENS = 32_768
"""Longer prompts are hashed on a thread: 262,144 tokens take some 6 ms."""


class Dispatch:
    def __init__(self, bus: Bus, streams: dict[str, TokenStream]) -> None:
        """`streams`: the open streams by their present id on the bus, shared with the client."""
        self._bus = bus
        self._streams = streams

    async def place(self, stream: TokenStream, engines: Iterable[Engine]) -> Accepted | Rejected | None:
        """Offer `stream`, with what it has of output, to `engines` until one accepts.

        Rejected: of all refusals the final one (a bad request stays one) or the one with the shortest wait.
        None: none could be reached. Raises services.bus.MessageTooLarge.
        """
        refused: Rejected | None = None
        for engine in await self._ranked(stream, engines):
            reply = await self._offer(stream, engine)
            if isinstance(reply, Accepted):
                return reply
            if isinstance(reply, Rejected):
                if reply.reason in ("bad_request", "context_length"):
                    return reply
                if refused is None or _wait(reply) < _wait(refused):
                    refused = reply
        return refused

    def cancel(self, engine_id: str, wire_id: str) -> None:
        self._bus.post(subjects.cancel(engine_id), codec.encode(Cancel(wire_id)))

    async def _ranked(self, stream: TokenStream, engines: Iterable[Engine]) -> list[Engine]:
        by_id = {engine.engine_id: engine for engine in engines}
        if len(by_id) < 2:
            return list(by_id.values())
        packed = stream.request.prompt + pack_ids(stream.output)
        tokens = len(packed) // 4
        names: dict[str, list[bytes]] = {}
        for engine in by_id.values():
            if engine.card is not None and engine.card.fingerprint not in names:
                root = hashing.root(engine.card.fingerprint, stream.request.cache_salt)
                if tokens > HASH_INLINE_TOKENS:
                    names[engine.card.fingerprint] = await asyncio.to_thread(hashing.chain_packed, root, packed)
                else:
                    names[engine.card.fingerprint] = hashing.chain_packed(root, packed)
        candidates = [
            Candidate(e.engine_id, e.load, e.blocks.overlap(names[e.card.fingerprint]), len(e.assigned))
            for e in by_id.values()
            if e.card is not None
        ]
        return [by_id[engine_id] for engine_id in choose(tokens // hashing.BLOCK_TOKENS, candidates)]

    async def _offer(self, stream: TokenStream, engine: Engine) -> Accepted | Rejected | None:
        """None: not reached, or it did not answer."""
        if engine.card is None:
            return None
        self._streams.pop(stream.wire_id, None)
        stream.assign(engine.engine_id, engine.incarnation, engine.card)
        # Before the request goes out: the first tokens may overtake the answer.
        self._streams[stream.wire_id] = stream
        engine.assigned.add(stream.wire_id)
        reply: Accepted | Rejected | None = None
        maybe_running = True
        try:
            reply = await self._ask(stream, engine)
            maybe_running = False
        except NoReply:
            if stream.heard:
                reply = Accepted(stream.wire_id, engine.engine_id)
        except (NoListener, NotConnected):
            maybe_running = False
        except MessageTooLarge:
            maybe_running = False
            raise
        finally:  # also when our caller is cancelled
            if isinstance(reply, Accepted):
                stream.placed = True
                stream.heard = stream.heard or time.monotonic()
            else:
                self._streams.pop(stream.wire_id, None)
                engine.assigned.discard(stream.wire_id)
                if maybe_running:
                    self.cancel(engine.engine_id, stream.wire_id)
        return reply

    async def _ask(self, stream: TokenStream, engine: Engine) -> Accepted | Rejected:
        message = codec.encode(
            msgspec.structs.replace(stream.request, request_id=stream.wire_id, generated=pack_ids(stream.output))
        )
        subject = subjects.generate(engine.engine_id)
        try:
            data = await self._bus.request(subject, message, ACCEPT_SECONDS, stream.headers)
        except NoReply:
            if stream.heard:  # it runs: only the answer was lost
                raise
            data = await self._bus.request(subject, message, ACCEPT_SECONDS, stream.headers)
        return codec.generate_reply.decode(data)


def _wait(reply: Rejected) -> float:
    return reply.retry_after if reply.reason == "overloaded" else 60.0 + reply.retry_after
