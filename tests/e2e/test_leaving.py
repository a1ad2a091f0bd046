"""Clients that leave before any output and ask again, beside one that stays: samovar-tiny and all real processes."""

import json
import os
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.e2e.stack import Stack, wait_until

CHUNK = 128
CHUNKS = 4
"""Of the prefill at least, before a client leaves."""
WORDS = 950
WORD = ("river", "amber", "nickel", "mango", "violet", "tundra", "copper", "falcon", "maple", "indigo", "pepper")
DECODED = 'computed_tokens_total{phase="decode"}'
FREE_CHUNKS = 17
"""What may still run for a client that has left: one chunk, and others for 0.5 s. (One was seen.)"""
FREE_SECONDS = 5.0
"""For that to be seen, on a machine that may be busy."""


def asking(seed: int, words: int = WORDS, **fields: Any) -> dict[str, Any]:
    """A question of its own from the first block on, with thoughts off."""
    rng = random.Random(seed)
    text = f"{seed}: remember this. " + " ".join(f"{rng.choice(WORD)} {rng.randrange(10)}" for _ in range(words))
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        **fields,
    }


def answer(stack: Stack, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def send(stack: Stack, body: dict[str, Any]) -> socket.socket:
    """Asked over a bare connection, so that a test decides how it ends."""
    data = json.dumps(body | {"stream": True}).encode()
    client = socket.create_connection(("127.0.0.1", stack.port), timeout=60)
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return client


def close(client: socket.socket) -> None:
    client.close()


def half_close(client: socket.socket) -> None:
    """The server's read side is shut. What a client that closes sends before it is sent anything is the same FIN, so
    this one is taken to have left as well; it gets no more than was under way."""
    client.shutdown(socket.SHUT_WR)
    while data := client.recv(65536):
        assert b'"content":"' not in data
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def engine(stack: Stack, name: str) -> int:
    return int(stack.metric("engine-0", f"samovar_engine_{name}"))


def running(stack: Stack) -> int:
    return engine(stack, "requests_running")


def prefilled(stack: Stack) -> int:
    return engine(stack, 'computed_tokens_total{phase="prefill"}')


@contextmanager
def decoding(stack: Stack, tokens: int) -> Generator[None, None, None]:
    """Beside another client's answer of so many tokens, which goes on during the whole block and comes whole."""
    body = asking(1, 10, max_tokens=tokens, logit_bias={"4089": -100, "4087": -100})
    replies: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: replies.append(answer(stack, body)))
    decoded = engine(stack, DECODED)
    client.start()
    wait_until("it decodes", lambda: engine(stack, DECODED) > decoded)
    yield
    assert not replies, "it was over before the others were"
    client.join()
    (choice,), usage = replies[0]["choices"], replies[0]["usage"]
    assert (choice["finish_reason"], usage["completion_tokens"]) == ("length", tokens)
    assert usage["samovar"]["preemptions"] == 0
    wait_until("all are gone", lambda: running(stack) == 0)


def test_what_was_read_before_leaving_is_not_read_again(tiny: Stack) -> None:
    log = len(tiny.log.read_text())
    body = asking(2)
    ways: tuple[Callable[[socket.socket], None], ...] = (close, half_close, reset)
    read = 0
    with decoding(tiny, 300):
        for leave in ways:
            before = prefilled(tiny)
            client = send(tiny, body)
            wait_until("some chunks are done", lambda at=before: prefilled(tiny) >= at + CHUNKS * CHUNK)
            left = prefilled(tiny)
            leave(client)
            wait_until(f"its place is free: {leave.__name__}", lambda: running(tiny) == 1, FREE_SECONDS)
            now = prefilled(tiny)
            assert now - left <= FREE_CHUNKS * CHUNK
            read += now - before
    usage = answer(tiny, body)["usage"]
    assert usage["prompt_tokens"] > read, "none of them could have freed its place by finishing"
    assert usage["prompt_tokens_details"]["cached_tokens"] >= read - CHUNK
    assert read >= len(ways) * CHUNKS * CHUNK
    said = tiny.log.read_text()[log:]
    assert said.count("status=499") == len(ways)
    assert "status=500" not in said
    assert "Traceback" not in said


def test_one_who_leaves_the_queue_never_starts_and_takes_nobody_along(tiny: Stack) -> None:
    cancels = engine(tiny, "cancels_total")
    replies: list[dict[str, Any]] = []
    with decoding(tiny, 200):
        own = prefilled(tiny)
        reads = threading.Thread(target=lambda: replies.append(answer(tiny, asking(3, 450))))
        reads.start()
        wait_until("both places are taken", lambda: running(tiny) == 2)
        client = send(tiny, asking(4))
        wait_until("it waits", lambda: engine(tiny, "requests_waiting") == 1)
        client.close()
        wait_until("it is gone", lambda: engine(tiny, "requests_waiting") == 0, FREE_SECONDS)
        assert running(tiny) == 2
        reads.join()
        assert replies[0]["choices"][0]["finish_reason"] in ("stop", "length")
        assert prefilled(tiny) - own == replies[0]["usage"]["prompt_tokens"]
    assert engine(tiny, "cancels_total") == cancels + 1


def test_leaving_amid_a_restore(tiny: Stack) -> None:
    """The kvstore stands still, so that the restore does not end before the client leaves."""
    body = asking(5, 250)
    first = answer(tiny, body)
    answer(tiny, asking(2))  # the device has no room for both
    store = tiny.pid("kvstore")
    before = prefilled(tiny)
    os.kill(store, signal.SIGSTOP)
    try:
        client = send(tiny, body)
        wait_until("it waits for the kvstore", lambda: running(tiny) == 1)
        close(client)
        wait_until("its place is free", lambda: running(tiny) == 0, FREE_SECONDS)
        assert prefilled(tiny) == before, "it never ran"
    finally:
        os.kill(store, signal.SIGCONT)
    again = answer(tiny, body)
    assert again["choices"] == first["choices"]
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 2 * CHUNK
    assert usage["samovar"]["cached_host"] > 0
    assert "Traceback" not in tiny.log.read_text()


def test_a_short_turn_without_thoughts_is_read_once(tiny: Stack) -> None:
    """T16: the history leaves out the empty thoughts that opened the first turn."""
    messages = [{"role": "user", "content": "Hi"}]
    fields = {"max_tokens": 8, "temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    opened = tiny.chat(messages, **fields)
    for turn in range(3):
        said = opened["choices"][0]["message"]["content"] or ""
        # All but what opens the answer: <think>, a line break twice, </think>, and perhaps one more token.
        common = opened["usage"]["prompt_tokens"] - 5
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Bye {turn}"}]
        opened = tiny.chat(messages, **fields)
        assert opened["usage"]["prompt_tokens_details"]["cached_tokens"] >= common > 0
