"""Tokenizer bundles, fetched from engines over the bus in chunks and kept by digest."""

import asyncio
import hashlib
import logging
import zlib

import msgspec

from services.bus import Bus, BusError
from services.gateway.engine_errors import NoEngine
from services.gateway.engines import Engine, Engines
from services.protocol import codec, subjects
from services.protocol.events import ModelCard, TokenizerBundle

log = logging.getLogger(__name__)

CHUNK_SECONDS = 3.0
CHUNK_TRIES = 3
CHUNKS_MAX = 1024
"""512 MiB compressed: beyond that the answer is broken."""
KEPT = 8
"""Bundles of models that were replaced are forgotten beyond this; one takes up to some 50 MiB."""


class Bundles:
    def __init__(self, bus: Bus, engines: Engines) -> None:
        self._bus = bus
        self._engines = engines
        self._kept: dict[str, TokenizerBundle] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, card: ModelCard) -> TokenizerBundle:
        """The bundle that `card` names. Raises NoEngine when no engine sends it whole and unbroken."""
        digest = card.tokenizer_digest
        if digest not in self._kept:
            async with self._locks.setdefault(digest, asyncio.Lock()):
                if digest not in self._kept:
                    self._keep(digest, await self._fetch(card))
        return self._kept[digest]

    def _keep(self, digest: str, bundle: TokenizerBundle) -> None:
        self._kept[digest] = bundle
        while len(self._kept) > KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._locks.pop(oldest, None)

    async def _fetch(self, card: ModelCard) -> TokenizerBundle:
        why = "no engine has it"
        for engine in self._engines.all():
            if engine.card is None or engine.card.tokenizer_digest != card.tokenizer_digest:
                continue
            try:
                return await self._fetch_from(engine, card.tokenizer_digest)
            except (BusError, ValueError, zlib.error, msgspec.DecodeError) as error:
                why = f"engine {engine.engine_id}: {error}"
                log.warning("tokenizer of %s: %s", card.name, why)
        raise NoEngine(f"The tokenizer of {card.name} could not be fetched: {why}.")

    async def _fetch_from(self, engine: Engine, digest: str) -> TokenizerBundle:
        parts: list[bytes] = []
        count = 1
        while len(parts) < count:
            chunk = codec.tokenizer_chunk.decode(await self._chunk(engine.engine_id, len(parts)))
            if chunk.digest != digest or chunk.index != len(parts) or not 1 <= chunk.count <= CHUNKS_MAX:
                raise ValueError(f"chunk {len(parts)} is one of another bundle")
            parts.append(chunk.data)
            count = chunk.count
        return await asyncio.to_thread(_unpack, b"".join(parts), digest)

    async def _chunk(self, engine_id: str, index: int) -> bytes:
        for attempt in range(CHUNK_TRIES):
            try:
                return await self._bus.request(subjects.tokenizer(engine_id), str(index).encode(), CHUNK_SECONDS)
            except BusError:
                if attempt + 1 == CHUNK_TRIES:
                    raise
        raise AssertionError("unreachable")


def _unpack(data: bytes, digest: str) -> TokenizerBundle:
    if hashlib.blake2b(data, digest_size=16).hexdigest() != digest:
        raise ValueError("the bundle does not have the digest that its card names")
    return codec.tokenizer_bundle.decode(zlib.decompress(data))
