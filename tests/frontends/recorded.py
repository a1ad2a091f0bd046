"""What a client sent, as test data for the gateway: small, and without anything of the machine or its user."""

import json
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.frontends.client import Client
from tests.frontends.recorder import Exchange
from tests.frontends.task import Task, script

LONGEST = 240
"""Characters of a text that are kept whole; system prompts and the descriptions of tools are the client's work, and
only their beginnings matter here."""
KEPT = 80

_HEADERS = re.compile(
    r"user-agent|anthropic-.*|x-claude-code-.*|x-(parent-)?session-.*|(session|thread)-id|x-codex-parent.*"
)
_MACHINE = ("x-codex-installation-id",)
_UNSTABLE = re.compile(r'("(?:device_id|installation_id)":")[^"]*')


def write(client: Client, exchanges: Sequence[Exchange], task: Task, folder: Path) -> Path:
    """Of a run with a scripted engine; what it said is kept beside each request. `folder` is where to."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{client.name}.json"
    home = task.folder.parent
    lines = script(client.read, client.write, client.titles)
    turns = iter(lines[1:] if client.titles else lines)
    requests = []
    for exchange in exchanges:
        if exchange.method == "POST":
            body = json.loads(exchange.body)
            line = next(turns) if "tools" in body and body.get("stream") else lines[0]
            requests.append(_request(exchange, body, home) | {"said": _nobodys(task.said(line), home)})
    data = {
        "client": client.package,
        "version": client.version,
        "recorded": datetime.now(UTC).date().isoformat(),
        "requests": requests,
    }
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return path


def _request(exchange: Exchange, body: Any, home: Path) -> dict[str, Any]:
    headers = {name: value for name, value in exchange.headers.items() if _HEADERS.fullmatch(name)}
    return {"method": exchange.method, "path": exchange.path, "headers": headers, "body": _plain(body, home)}


def _plain(value: Any, home: Path) -> Any:
    match value:
        case dict():
            return {name: "0" if name in _MACHINE else _plain(item, home) for name, item in value.items()}
        case list():
            return [_plain(item, home) for item in value]
        case str():
            text = _nobodys(value, home)
            return text if len(text) <= LONGEST else text[:KEPT] + " [...]"
        case _:
            return value


def _nobodys(text: str, home: Path) -> str:
    text = text.replace(str(home), "/home/user").replace(platform.release(), "6.1.0")
    if node := platform.node():
        text = text.replace(node, "localhost")
    return _UNSTABLE.sub(r"\g<1>0", text)
