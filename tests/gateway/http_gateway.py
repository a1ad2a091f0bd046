"""The gateway's application behind a real uvicorn on a free port, on the test's own loop."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import httpx

from services.gateway.app import Deps, create_app
from services.gateway.config import GatewayConfig
from services.gateway.serve import UvicornServer, listen, url
from services.gateway.sessions import SessionStore
from tests.gateway.fake_engines import MODEL, FakeEngines

HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


@dataclass
class Gateway:
    url: str
    deps: Deps
    engines: FakeEngines
    http: httpx.AsyncClient

    async def chat(self, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
        """POST a chat; a field given as None is left out."""
        body = {name: value for name, value in {**HELLO, **fields}.items() if value is not None}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def sample(self, name: str, **labels: str) -> float:
        """The value of one metric."""
        text = (await self.http.get("/metrics")).text
        found = [line for line in text.splitlines() if line.startswith(f"samovar_gateway_{name}")]
        for line in found:
            head, _, value = line.rpartition(" ")
            rest = head.removeprefix(f"samovar_gateway_{name}")
            if (rest == "" and not labels) or (labels and all(f'{k}="{v}"' in rest for k, v in labels.items())):
                return float(value)
        return 0.0


@contextlib.asynccontextmanager
async def gateway(
    engines: FakeEngines | None = None, database: str = "", **config: object
) -> AsyncGenerator[Gateway, None]:
    engines = engines or FakeEngines()
    deps = Deps(
        config=GatewayConfig(**config),
        engines=engines,  # type: ignore[arg-type]
        sessions=SessionStore(database, 1000),
    )
    listener = listen("127.0.0.1", 0)
    address = url(listener)
    server = UvicornServer(create_app(deps), listener)
    running = asyncio.create_task(server.run())
    try:
        async with httpx.AsyncClient(base_url=address, timeout=10, verify=False) as http:
            yield Gateway(address, deps, engines, http)
    finally:
        deps.open_answers.end_all()
        server.stop()
        await running


def events(text: str) -> list[dict]:
    """The JSON objects of a stream that must be nothing but `data: ` lines and end with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def content(chunks: list[dict]) -> str:
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
