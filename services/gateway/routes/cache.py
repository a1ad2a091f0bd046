"""GET /samovar/cache: what each engine has cached of which contexts. `samovar cache` shows it."""

import asyncio

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from msgspec import Struct

from services.bus import BusError
from services.gateway.engine_client import EngineClient
from services.gateway.openapi.described import KEY, Described
from services.protocol import codec, subjects
from services.protocol.events import CacheTree, EngineState

PATH = "/samovar/cache"
ANSWER_SECONDS = 2.0


class EngineCache(Struct, frozen=True, kw_only=True):
    engine_id: str
    state: EngineState
    tree: CacheTree | None = None
    """Its names are bytes in base64. Null where the engine did not answer."""
    error: str = ""
    """Why it did not, for people."""


class Caches(Struct, frozen=True, kw_only=True):
    engines: list[EngineCache]
    """All that are heard, by id."""


def cache_route(engines: EngineClient) -> HTTPRouteHandler:
    @get(PATH, opt={KEY: Described(summary="What the engines have cached")})
    async def show_cache() -> Caches:
        """Takes ANSWER_SECONDS where an engine does not answer."""
        states = sorted(engines.states().items())
        return Caches(engines=await asyncio.gather(*(_ask(engines, *engine) for engine in states)))

    return show_cache


async def _ask(engines: EngineClient, engine_id: str, state: EngineState) -> EngineCache:
    if state in ("loading", "failed"):
        return EngineCache(engine_id=engine_id, state=state, error=f"it is {state}")
    try:
        answer = await engines.bus.request(subjects.cache(engine_id), b"", ANSWER_SECONDS)
        return EngineCache(engine_id=engine_id, state=state, tree=codec.cache_tree.decode(answer))
    except (BusError, msgspec.DecodeError) as error:
        return EngineCache(engine_id=engine_id, state=state, error=str(error))
