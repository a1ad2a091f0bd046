"""`samovar cache`: which contexts the engines of a running stack have cached, and where."""

import http.client
import os
import ssl
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
import rich.console
from msgspec import Struct
from rich.text import Text

from services.cli import running
from services.cli.cache_page import page
from services.cli.console import lossy
from services.protocol.events import CacheTree
from services.settings import variable

PATH = "/samovar/cache"
ANSWER_SECONDS = 10.0


class EngineCache(Struct, frozen=True, kw_only=True):
    """As the gateway answers."""

    engine_id: str
    state: str
    tree: CacheTree | None = None
    error: str = ""


class Caches(Struct, frozen=True, kw_only=True):
    engines: Sequence[EngineCache]


class Unreachable(Exception):
    """No answer; the message says why and what to do."""


def run(url: str | None, key: str | None, as_json: bool) -> int:
    """Returns the exit code. `url`: the gateway's; None: of the stack that runs on this machine."""
    try:
        answer = _fetch(url or _running(), key or _own_key())
        caches = msgspec.json.decode(answer, type=Caches)
    except (Unreachable, msgspec.DecodeError) as error:
        print(f"samovar: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(answer.decode(), file=lossy(sys.stdout))
        return 0
    show(caches, rich.console.Console(file=lossy(sys.stdout), highlight=False, markup=False, emoji=False))
    return 0


def show(caches: Caches, out: rich.console.Console) -> None:
    """Plain lines of 79 columns at most; with colours where `out` is a terminal."""
    if not caches.engines:
        out.print("No engine is heard.")
    for place, engine in enumerate(caches.engines):
        if place:
            out.print()
        if engine.tree is None:
            out.print(Text(f"engine {engine.engine_id}: no answer ({engine.error})", style="red"), soft_wrap=True)
            continue
        for line in page(engine.tree):
            out.print(line, soft_wrap=True)


def _running() -> str:
    found = running.urls()
    if not found:
        raise Unreachable("no `samovar up` of yours runs on this machine; --url names one elsewhere")
    if len(found) > 1:
        raise Unreachable(f"several stacks run here; choose one: {', '.join(f'--url {url}' for url in found)}")
    return found[0]


def _own_key() -> str:
    """The first of the keys that the environment gives a gateway."""
    return os.environ.get(variable("api_keys"), "").split(",")[0].strip()


def _fetch(url: str, key: str) -> bytes:
    """The body of an answer. No proxy is asked: the address is meant as it is."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if not parts.hostname:
        raise Unreachable(f"{url!r} is no address; write it like http://127.0.0.1:8080")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=ANSWER_SECONDS, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=ANSWER_SECONDS)
        connection.request("GET", parts.path.rstrip("/").removesuffix("/v1") + PATH, headers=headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(f"{url} does not answer: {error or type(error).__name__}") from None
    if response.status == 401:
        raise Unreachable(f"{url} needs an API key: --key, or {variable('api_keys')} in the environment")
    if response.status != 200:
        raise Unreachable(f"{url} answers {response.status} to {PATH}: {body[:200].decode(errors='replace')}")
    return body
