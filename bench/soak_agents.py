"""Agents that talk to a stack at random, and remember what they were told: the same prompt must get the same answer."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

CASES = [json.loads(line) for line in Path(__file__).with_name("data").joinpath("tiny_tools.jsonl").open()]
WORDS = ("river", "stone", "lamp", "wheel", "garden", "paper", "window", "silver", "horse", "candle", "bridge", "cloud")
SYSTEMS = 3
TURNS = 7
RETRIES = 120
MOST_CHARACTERS = 7000
"""Of a conversation's messages: behind that it is compacted."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    thoughts: str
    calls: tuple[tuple[str, str], ...]
    finish: str
    prompt_tokens: int

    @classmethod
    def of(cls, reply: dict[str, Any]) -> "Answer":
        choice = reply["choices"][0]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        return cls(
            message.get("content") or "",
            message.get("reasoning_content") or "",
            tuple(calls),
            choice["finish_reason"],
            reply["usage"]["prompt_tokens"],
        )


@dataclass(slots=True)
class Record:
    """Of all agents."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """What must not be, in words."""
    first: dict[str, Answer] = field(default_factory=dict)
    """By body, to the letter."""

    def answered(self, body: dict[str, Any], reply: dict[str, Any]) -> None:
        answer, key = Answer.of(reply), json.dumps(body)
        usage = reply["usage"]["samovar"]
        for name in ("cached_device", "cached_host", "computed_tokens"):
            self.counts[name] += usage.get(name, 0)
        before = self.first.setdefault(key, answer)
        if before is answer:
            self.counts["new prompts"] += 1
        elif before == answer:
            self.counts["repeats that agree"] += 1
        elif before.prompt_tokens != answer.prompt_tokens:
            self.counts["repeats rendered otherwise"] += 1
        else:
            self.wrong.append(f"{key[-300:]}\n  first  {before}\n  again  {answer}\n  usage {reply['usage']}")

    def left(self, body: dict[str, Any], text: str) -> None:
        """A client left when it had read this much of an answer's text."""
        self.counts["left"] += 1
        known = self.first.get(json.dumps(body))
        if known is not None and not known.text.startswith(text):
            self.wrong.append(f"{text!r} was read of the answer {known.text!r}")


class Agent:
    """One conversation after the other until it is told to stop; some of them sub-agents' of the one before."""

    def __init__(self, client: httpx.AsyncClient, record: Record, seed: int) -> None:
        self._client = client
        self._record = record
        self._random = random.Random(seed)
        self._name = f"agent-{seed}"
        self._sessions = 0
        self._headers: dict[str, str] = {}

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            parent = self._headers.get("x-session-id", "")
            self._sessions += 1
            self._headers = {"x-session-id": f"{self._name}-{self._sessions}"}
            if parent and self._random.random() < 0.3:
                self._headers["x-parent-session-id"] = parent
                self._record.counts["sub-agents"] += 1
            await self._conversation(stop)

    async def _conversation(self, stop: asyncio.Event) -> None:
        rng, case = self._random, self._random.choice(CASES)
        number = rng.randrange(SYSTEMS)
        system = f"You are helper {number}. " + " ".join(random.Random(number).choices(WORDS, k=150))
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}, case["messages"][-1]]
        fixed = {"tools": case["tools"]} if rng.random() < 0.7 else {}
        if rng.random() < 0.7:
            fixed["reasoning_effort"] = "none"
        for _ in range(rng.randint(1, TURNS)):
            if stop.is_set():
                return
            body = {"messages": list(messages), "temperature": 0, "max_tokens": rng.choice([4, 24, 60]), **fixed}
            if rng.random() < 0.15:
                messages.append({"role": "assistant", "content": await self._leave(body) or "..."})
                messages.append({"role": "user", "content": self._task(4)})
                continue
            reply = await self._ask(body)
            if rng.random() < 0.2:
                await self._ask(body)
            if self._record.first and rng.random() < 0.25:
                await self._ask(json.loads(rng.choice(list(self._record.first)[-400:])))
            messages.append(self._said(reply["choices"][0]["message"]))
            for call in messages[-1].get("tool_calls", ()):
                self._record.counts["tool results"] += 1
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._words(30)})
            if messages[-1]["role"] != "tool":
                messages.append({"role": "user", "content": self._task(rng.choice([3, 8, 40]))})
            self._edit(messages)

    def _said(self, message: dict[str, Any]) -> dict[str, Any]:
        """As a client sends it back: with its thoughts, or without."""
        kept = ("role", "content", "tool_calls") + (("reasoning_content",) if self._random.random() < 0.5 else ())
        return {name: message[name] for name in kept if message.get(name)} or {"role": "assistant", "content": "."}

    def _edit(self, messages: list[dict[str, Any]]) -> None:
        """Now and then an old message is another one; a long conversation loses its middle."""
        rng = self._random
        texts = [index for index, message in enumerate(messages) if message["role"] in ("tool", "user")]
        if rng.random() < 0.1:
            self._record.counts["edits"] += 1
            place = rng.choice(texts)
            messages[place] = {**messages[place], "content": self._words(10)}
        if sum(len(str(message.get("content", ""))) for message in messages) > MOST_CHARACTERS:
            self._record.counts["compactions"] += 1
            del messages[2:]
            messages.append({"role": "assistant", "content": self._words(40)})
            messages.append({"role": "user", "content": "Go on."})

    def _task(self, words: int) -> str:
        """What the small model can do, so that its answers depend on what it was told."""
        return self._random.choice(("List these words, one a line: ", "Repeat this text exactly: ")) + self._words(
            words
        )

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=count)) + f" {self._random.randrange(10**6)}"

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError for anything but an answer; where no engine is there it comes again."""
        for _ in range(RETRIES):
            reply = await self._client.post("/v1/chat/completions", json=body, headers=self._headers)
            if reply.status_code == 503:
                self._record.counts["turned away"] += 1
                await asyncio.sleep(0.5)
                continue
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code}: {reply.text[:500]}")
            self._record.counts["answers"] += 1
            self._record.answered(body, reply.json())
            return reply.json()
        raise RuntimeError("turned away for a minute")

    async def _leave(self, body: dict[str, Any]) -> str:
        """Read some of a streamed answer and go; returns its text."""
        chunks, text = self._random.choice([0, 1, 3, 12]), ""
        streamed = {**body, "stream": True}
        async with self._client.stream("POST", "/v1/chat/completions", json=streamed, headers=self._headers) as reply:
            async for line in reply.aiter_lines():
                if chunks <= 0 or line == "data: [DONE]":
                    break
                if line.startswith("data: {"):
                    chunks -= 1
                    for choice in json.loads(line[6:]).get("choices", ()):
                        text += choice["delta"].get("content") or ""
        self._record.left(body, text)
        return text
