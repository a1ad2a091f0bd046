"""The OpenAPI document is true: it names every route, and schemathesis finds no answer that it does not tell of.

SAMOVAR_API_EXAMPLES=300 asks each operation 300 random times and not only a few known ones; it takes some minutes.
"""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.fake_engines import FakeEngines
from tests.gateway.http_gateway import gateway

EXAMPLES = os.environ.get("SAMOVAR_API_EXAMPLES", "")
TWICE = "^/(responses|models|props)|/(count_tokens|input_tokens)$"
"""Paths that are also served under /v1, and those that read the same bodies as others: left out in CI."""
AMOUNT = (
    ["--max-examples", EXAMPLES]
    if EXAMPLES
    else ["--max-examples", "3", "--generation-deterministic", "--exclude-path-regex", TWICE]
)

NOT_CHECKED = (
    # A schema does not say which parts a model can read, nor that an `image` is refused: that is a 400 by its content.
    "positive_data_acceptance",
    # Litestar answers OPTIONS (without an Origin, so to no browser) for one of a path's handlers.
    "allow_header_conformance",
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway whose engines answer everything, on a loop of its own."""
    address: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        # An unknown model would be most of what a tool makes up: here every name is one.
        async with gateway(FakeEngines().says("Hello <b>!"), model_aliases=("*",)) as g:
            address.append(g.url)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield address[0]
    done.set()
    thread.join(10)


@pytest.mark.timeout(3600 if EXAMPLES else 300)
def test_every_answer_is_as_described(url: str, tmp_path: Path) -> None:
    options = [*AMOUNT, "--exclude-checks", ",".join(NOT_CHECKED), "--no-color"]
    run = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{28 if EXAMPLES else 19} selected" in run.stdout


async def test_the_document_names_what_agents_ask_for_and_who_needs_a_key() -> None:
    async with gateway(api_keys=("key",)) as g:
        response = await g.http.get("/openapi.json")
        assert response.headers["content-type"] == "application/json"
        document = response.json()
        assert document["openapi"] == "3.1.0"
        paths = document["paths"]
        for method, path in (
            ("post", "/v1/chat/completions"),
            ("post", "/v1/completions"),
            ("post", "/v1/messages"),
            ("post", "/v1/messages/count_tokens"),
            ("post", "/v1/responses"),
            ("get", "/v1/responses/{response_id}"),
            ("delete", "/v1/responses/{response_id}"),
            ("get", "/v1/models/{model_id}"),
            ("post", "/tokenize"),
            ("get", "/samovar/cache"),
        ):
            operation = paths[path][method]
            assert operation["security"] == [{"bearer": []}, {"header": []}]
            assert "401" in operation["responses"]
        assert "security" not in paths["/health/ready"]["get"]
        chat = paths["/v1/chat/completions"]["post"]
        assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        schema = document["components"]["schemas"]["ChatRequest"]["properties"]
        assert schema["presence_penalty"]["anyOf"][0] == {"type": "number", "minimum": -2, "maximum": 2}
        assert schema["n"]["anyOf"][0] == {"type": "integer", "enum": [1]}
        assert "529" in paths["/v1/messages"]["post"]["responses"]


async def test_a_path_that_is_asked_in_a_wrong_way_tells_the_right_ones() -> None:
    async with gateway() as g:
        response = await g.http.get("/v1/chat/completions")
        assert response.status_code == 405
        assert "POST" in response.headers["allow"]
