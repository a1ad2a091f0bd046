"""The languages of all served models, each fetched from an engine and read once."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from services.gateway.prompt.language import Language
from services.protocol.events import ModelCard, TokenizerBundle

_KEPT = 8
"""Models change their tokenizer when an operator loads another; the oldest go."""


class Languages:
    """By tokenizer digest, so that engines of one model share. On the event loop's thread."""

    def __init__(self, fetch: Callable[[ModelCard], Awaitable[TokenizerBundle]]) -> None:
        self._fetch = fetch
        # More threads would only take cores from the event loop: one tokenizes about a megabyte a second.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._loads: dict[str, asyncio.Task[Language]] = {}

    async def of(self, card: ModelCard) -> Language:
        """Requests that come while a language loads wait for the same load; a failed one is tried again by the next.

        Raises what `fetch` raises, and ValueError for a bundle that cannot be read.
        """
        load = self._loads.get(card.tokenizer_digest)
        if load is None or (load.done() and (load.cancelled() or load.exception() is not None)):
            while len(self._loads) >= _KEPT:
                del self._loads[next(iter(self._loads))]
            load = self._loads[card.tokenizer_digest] = asyncio.create_task(self._load(card))
        # Shielded: a client that leaves must not end the load for the others.
        return await asyncio.shield(load)

    async def _load(self, card: ModelCard) -> Language:
        bundle = await self._fetch(card)
        return await asyncio.get_running_loop().run_in_executor(self._threads, Language, bundle, self._threads)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
