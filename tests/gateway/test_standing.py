"""What the engines are told of a session between its requests."""

import asyncio
from typing import Any

import pytest

from services.gateway.conversation import Conversation, Question
from services.gateway.sessions.records import SessionHint
from services.gateway.standing import Errand, Errands
from services.protocol.generate import FinishReason, Standing
from tests.gateway.fake_engines import FakeEngines
from tests.gateway.http_gateway import gateway
from tests.gateway.output_rig import call
from tests.gateway.responses_rig import TINY
from tests.gateway.tiny import encode, tiny_engines

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
CALL = encode(f"Hm.\n</think>\n\n{call('read', path='a')}<|im_end|>")
TEXT = encode("Hm.\n</think>\n\nDone.<|im_end|>")
USER = {"role": "user", "content": "Go."}
MAIN = {"x-claude-code-session-id": "s"}
SUB = {**MAIN, "x-claude-code-agent-id": "a"}


@pytest.mark.parametrize(
    ("errand", "expected", "finish", "calls", "left"),
    [
        (Errand("s"), "idle", "stop", 0, "idle"),
        (Errand("s"), "idle", "cancel", 0, "idle"),
        (Errand("s", may_call=True), "waiting", "stop", 2, "waiting"),
        (Errand("s", may_call=True), "waiting", "stop", 0, "idle"),
        (Errand("s", may_call=True), "waiting", "length", 1, "idle"),
        (Errand("s", may_call=True), "waiting", "cancel", 1, "idle"),
        (Errand("s", may_call=True), "waiting", "error", 0, "idle"),
        (Errand("s", sub_agent=True, may_call=True), "waiting", "stop", 1, "waiting"),
        (Errand("s", sub_agent=True, may_call=True), "waiting", "stop", 0, "finished"),
        (Errand("s", sub_agent=True, may_call=True), "waiting", "cancel", 0, "idle"),
        (Errand("s", sub_agent=True), "finished", "stop", 0, "finished"),
        (Errand("s/side", side=True), "one_off", "stop", 0, "one_off"),
        (Errand("s/side", side=True), "one_off", "cancel", 0, "one_off"),
    ],
)
def test_standings(errand: Errand, expected: Standing, finish: FinishReason, calls: int, left: Standing) -> None:
    assert errand.expected == expected
    assert errand.left(finish, calls) == left


def question(hint: SessionHint, *messages: dict[str, Any], tools: bool = False) -> Question:
    return Question(prompt=Conversation(messages=messages or (USER,), tools=[TOOL] if tools else ()), session=hint)


def test_side_requests() -> None:
    errands = Errands(sessions=2)
    agents, anyone = SessionHint(header="s", agent=True), SessionHint(header="s")
    assert errands.of(question(anyone), "s") == Errand("s"), "a chat without tools"
    assert errands.of(question(agents), "s") == Errand("s/side", side=True), "an agent's title"
    answered = question(agents, USER, {"role": "assistant", "content": "Hi."}, USER)
    assert errands.of(answered, "s") == Errand("s"), "a chat that goes on"
    assert errands.of(question(anyone, tools=True), "s") == Errand("s", may_call=True)
    assert errands.of(question(anyone), "s") == errands.of(answered, "s") == Errand("s/side", side=True)
    for other in ("t", "u"):
        errands.of(question(anyone, tools=True), other)
    assert errands.of(question(anyone), "s") == Errand("s"), "forgotten"
    sub = SessionHint(header="s/a", parent="s", agent=True)
    assert errands.of(question(sub, tools=True), "s/a") == Errand("s/a", sub_agent=True, may_call=True)
    named = SessionHint(session_id="mine", header="s/a", parent="s", agent=True)
    assert errands.of(question(named, tools=True), "mine") == Errand("mine", may_call=True)


def saying(*answers: list[int]) -> FakeEngines:
    engines, script = tiny_engines(), iter(answers)
    engines.on_call = lambda asked: asked._deliver(tuple(next(script)), "stop")
    return engines


async def test_engines_hear_of_it() -> None:
    async with gateway(saying(CALL, TEXT, CALL, TEXT, TEXT)) as g:
        for headers in (MAIN, MAIN, SUB, SUB):
            await g.chat(headers, model=TINY, messages=[USER], tools=[TOOL])
        await g.chat(MAIN, model=TINY, messages=[USER])
        told = [(asked.session_id, asked.stream.request.standing) for asked in g.engines.calls]
        assert told == [*[("s", "waiting")] * 2, *[("s/a", "waiting")] * 2, ("s/side", "one_off")]
        assert g.engines.notes == [("s", "idle"), ("s/a", "finished")]
        assert {s["id"] for s in (await g.http.get("/api/sessions")).json()["data"]} <= {"s", "s/a"}, "for people"


async def test_a_client_that_leaves() -> None:
    async with gateway(tiny_engines()) as g:
        asking = asyncio.create_task(g.chat(SUB, model=TINY, messages=[USER], tools=[TOOL]))
        asked = await g.engines.called()
        asked._deliver(tuple(CALL[:5]))
        asking.cancel()
        await asyncio.wait_for(asked.cancelled.wait(), 5)
        assert await g.engines.noted() == ("s/a", "idle")
