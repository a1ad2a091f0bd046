"""What came of one client's run, judged from its side, from the wire and from the gateway's own books."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.stack import wait_until
from tests.frontends.client import Client
from tests.frontends.recorder import Exchange
from tests.frontends.task import Task

BLOCK = 64
"""Tokens of a cache block: what is cached of a prompt is whole ones, but for engines with checkpoints."""

_ANSWER_ID = re.compile(rb'"id": ?"(?:chatcmpl-|msg_|resp_)([0-9a-f]{32})"')


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the client's main conversation, as the gateway recorded it."""

    prompt: int
    cached: int
    output: int
    """Tokens, all three."""


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    parent: str | None
    source: str
    """By what the gateway knew it: a SessionSource."""


@dataclass(frozen=True, slots=True)
class Outcome:
    task: Task
    exit_code: int | None
    """None: it had to be killed."""
    seconds: float
    output: str
    """What it printed."""
    exchanges: Sequence[Exchange]
    sessions: Sequence[Session]
    turns: Sequence[Turn]
    """Of the main one."""
    problems: Sequence[str]


def books(gateway: str, exchanges: Sequence[Exchange]) -> tuple[list[Session], list[Turn]]:
    """The sessions that the gateway knows, and the turns of the largest. Requests without tools (for a title, for one)
    are no turns, though some clients put them into the same session."""
    answered = sum(bool(request_id(exchange)) for exchange in exchanges)
    with httpx.Client(base_url=gateway, timeout=30, trust_env=False) as http:

        def listed() -> list[dict[str, Any]]:
            return http.get("/api/sessions").json()["data"]

        # The gateway writes them behind its answers.
        wait_until("all requests are in the books", lambda: sum(session["turns"] for session in listed()) >= answered)
        details = [http.get(f"/api/sessions/{session['id']}").json() for session in listed()]
    if not details:
        return [], []
    with_tools = {request_id(exchange) for exchange in exchanges if b'"tools"' in exchange.body}
    main = max(details, key=lambda detail: detail["session"]["turns"])
    turns = [
        Turn(request["prompt_tokens"], request["cached_device"] + request["cached_host"], request["output_tokens"])
        for request in reversed(main["requests"])
        if request["id"] in with_tools
    ]
    sessions = [detail["session"] for detail in details]
    return [Session(session["id"], session["parent"], session["source"]) for session in sessions], turns


def request_id(exchange: Exchange) -> str:
    """As the gateway named it, from the id of the answer; empty where there is none."""
    found = _ANSWER_ID.search(exchange.answer)
    return found[1].decode() if found else ""


def wire_problems(client: Client, exchanges: Sequence[Exchange]) -> list[str]:
    """Answers that are no success, and streams that did not come to their end."""
    found = []
    for number, exchange in enumerate(exchanges):
        name = f"request {number} ({exchange.method} {exchange.path})"
        if not 200 <= exchange.status < 300:
            found.append(f"{name} got {exchange.status}: {bytes(exchange.answer[:300])!r}")
        elif not exchange.ended:
            found.append(f"{name}: the client left before the end of the answer")
        elif exchange.method == "POST" and b'"stream":true' in exchange.body and client.ending not in exchange.answer:
            found.append(f"{name}: the stream ends with {bytes(exchange.answer[-100:])!r}")
    if not any(exchange.path.partition("?")[0] == client.path for exchange in exchanges):
        found.append(f"nothing was sent to {client.path}")
    return found


def session_problems(client: Client, sessions: Sequence[Session], turns: Sequence[Turn], agents: int) -> list[str]:
    """A conversation that was not recognised, or was read again. `agents`: of which each has a session."""
    found = []
    if len(turns) < 2:
        found.append(f"the conversation has {len(turns)} turns")
    if len(sessions) != agents:
        found.append(f"{agents} agents have {len(sessions)} sessions")
    if any(session.source != client.session for session in sessions):
        found.append(f"sessions were not named by {client.session}: {', '.join(s.source for s in sessions)}")
    parents = [session.parent for session in sessions if session.parent is not None]
    if client.session == "header" and len(parents) != agents - 1:
        found.append(f"{len(parents)} of {len(sessions)} sessions have a parent")
    for number, (before, turn) in enumerate(itertools.pairwise(turns), 2):
        if turn.cached <= before.prompt - BLOCK:
            found.append(f"turn {number}: {turn.cached} tokens were cached, though the turn before had {before.prompt}")
    return found
