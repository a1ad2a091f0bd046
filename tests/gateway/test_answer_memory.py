"""The bounds of what is kept of answers, where they are found, and the salts that part tenants."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from services.gateway.answer_memory import _ROW_BYTES, AnswerMemory, places
from services.gateway.output.heard_answer import HeardAnswer
from services.gateway.output.pieces import CallDelta, Content, Reasoning
from services.gateway.prompt.written_answer import content_digest, thoughts_digest
from services.gateway.sessions import RowBounds, SessionStore
from services.gateway.sessions.records import AnswerRecord
from services.protocol.generate import pack_ids, unpack_ids
from tests.gateway.http_gateway import gateway
from tests.gateway.responses_rig import TINY
from tests.gateway.tiny import encode, tiny_engines

USER = {"role": "user", "content": "Go."}


def record(id: str, ids: int = 25, **fields: Any) -> AnswerRecord:
    values: dict[str, Any] = {
        "place": id.encode(),
        "language": "l",
        "lead": "<|im_start|>assistant\n",
        "thinking": False,
        "whole": True,
        "thoughts": b"",
        "content": content_digest("Well."),
        **fields,
    }
    return AnswerRecord(id=id, ids=pack_ids(range(ids)), **values)


def said(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [USER, *({"role": "assistant", "content": "Well.", **message} for message in messages)]


def written(path: Path) -> list[str]:
    reader = sqlite3.connect(path)
    try:
        return [id for (id,) in reader.execute("SELECT id FROM answers ORDER BY number")]
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [(RowBounds(), ["a0", "a1", "a2", "a3"]), (RowBounds(rows=2), ["a2", "a3"]), (RowBounds(bytes=100), ["a3"])],
)
async def test_the_oldest_go(tmp_path: Path, bounds: RowBounds, kept: list[str]) -> None:
    sessions = SessionStore(str(tmp_path / "s.db"), 1000, answers=bounds)
    await sessions.start()
    for number in range(4):
        sessions.keep_answer(record(f"a{number}"))
    sessions.keep_answer(record("a3"))  # a batch whose fate was unknown is written again
    assert await sessions.flush(5)
    assert written(tmp_path / "s.db") == kept
    assert sessions.dropped_rows == 0
    await sessions.close()


async def test_memory_holds_the_last_used_and_the_file_the_others(tmp_path: Path) -> None:
    sessions = SessionStore(str(tmp_path / "s.db"), 1000)
    await sessions.start()
    memory = AnswerMemory(sessions, recent_bytes=2 * (_ROW_BYTES + 100))
    one = record("one", calls=("c1", "c2"), thoughts=thoughts_digest("Hm."), thinking=True)
    for kept in (one, record("two"), record("three")):
        memory.keep(kept)
    assert list(memory._recent) == ["two", "three"]
    assert await sessions.flush(5)
    call = {"id": "c1", "function": {"name": "f"}}
    history = said({}, {"tool_calls": [call]}, {})
    at = {1: b"two", 2: b"elsewhere", 3: b"three", 4: b"next"}
    assert await memory.of(history, at, "l") == {1: [record("two")], 2: [one], 3: [record("three")]}
    assert await memory.of(history, at, "another") == {}
    assert memory._bytes == sum(record.size + _ROW_BYTES for record in memory._recent.values())
    assert set(memory._ids) == {key for kept in memory._recent.values() for key in (kept.place, *kept.calls[:1])}
    await sessions.close()


async def test_an_answer_under_way_is_found() -> None:
    sessions = SessionStore("", 1000)
    await sessions.start()
    memory = AnswerMemory(sessions)
    tokens = [1, 2]
    heard = HeardAnswer(
        "r", place=b"p", language="l", lead="", thinking=True, tokens=tokens, stop_ids=[9], keep=memory.keep
    )
    memory.follow(heard)
    heard.hear([Reasoning("H"), Reasoning("m."), Content("Well."), CallDelta(0, "{}", "c", "f", done=True)])
    heard.hear([CallDelta(1, "{", "d", "f")])
    tokens.append(3)
    (found,) = (await memory.of(said({}), {1: b"p", 2: b"next"}, "l"))[1]
    assert (found.calls, found.whole, unpack_ids(found.ids)) == (("c",), False, [1, 2, 3])
    assert (found.thoughts, found.content) == (thoughts_digest("Hm."), content_digest("Well."))
    tokens.append(9)
    heard.end(whole=True)
    (found,) = (await memory.of(said({}), {1: b"p", 2: b"next"}, "l"))[1]
    assert (found.whole, unpack_ids(found.ids)) == (False, [1, 2, 3]), "the second call has no end"
    await sessions.close()


def test_where_an_answer_is_given() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = said({"reasoning_content": "Hm.", "tool_calls": [call]}, {})
    one = places(chat, "salt", "l")
    assert list(one) == [1, 2, 3]
    assert len(set(one.values())) == 3
    changed = {**call, "function": {"name": "f", "arguments": {"a": 2}}}
    assert places(said({"content": " Well.\n", "tool_calls": [changed]}, {}), "salt", "l") == one
    assert places(chat, "", "l").keys() == one.keys()
    for other in (
        places(chat, "", "l"),
        places(chat, "salt", "m"),
        places([{**USER, "content": "Go!"}, *chat[1:]], "salt", "l"),
    ):
        assert not set(other.values()) & set(one.values())
    edited = places(said({"content": "No.", "tool_calls": [call]}, {}), "salt", "l")
    assert (edited[1] == one[1], edited[2] == one[2]) == (True, False)


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Go."},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    "/v1/responses": {"input": "Go."},
}


async def test_every_route_takes_a_salt() -> None:
    engines = tiny_engines()
    engines.on_call = lambda call: call._deliver(tuple(encode("</think>Well.<|im_end|>")), "stop")
    async with gateway(engines) as g:
        for path, body in ROUTES.items():
            for salt in ("one", None):
                response = await g.http.post(path, json={"model": TINY, **body, "cache_salt": salt})
                assert response.status_code == 200
        assert [call.cache_salt for call in engines.calls] == ["one", ""] * len(ROUTES)
