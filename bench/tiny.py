"""The small model through the whole stack on this machine: time to ready, speed, needles, tool calls. And its drafts.

The tool prompts (data/tiny_tools.jsonl: messages, tools, the one right answer) are of the generator that the model was
trained with, from its held-out names and words; none of them was in its training. The needles are those of the public
needle test (PyPI's cache-pressure).
"""

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx

from bench import results, tiny_drafts
from bench.stack import running
from tools.train.tasks.wording import ANIMALS, PANGRAMS, QUESTION

MODEL = Path(__file__).parents[1] / "models" / "samovar-tiny"
TOOL_CASES = Path(__file__).with_name("data") / "tiny_tools.jsonl"
NEEDLES = {2000: 20, 8000: 20}
"""Salts by prompt length in tokens."""
CHARS_PER_TOKEN = 2.75
"""Of the haystack."""
TOGETHER = 4


def main() -> None:
    print(f"written to {results.write('tiny-cpu', asyncio.run(_measure()))}")


async def _measure() -> dict[str, Any]:
    began = time.monotonic()
    with running("--model", str(MODEL), "--kv-size", "2GiB") as url:
        ready = time.monotonic() - began
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            measured: dict[str, Any] = {"seconds to ready": round(ready, 1)}
            print(measured, flush=True)
            measured |= await _rates(client)
            print(measured, flush=True)
            measured["needles found"] = {
                f"{n} tokens": await _needles(client, n, salts) for n, salts in NEEDLES.items()
            }
            print(measured["needles found"], flush=True)
            measured["tool calls"] = await _tool_calls(client)
            print(measured["tool calls"], flush=True)
    measured["draft acceptance"] = tiny_drafts.measure(tiny_drafts.load_small_model())
    return measured


async def _chat(client: httpx.AsyncClient, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    fields.setdefault("max_tokens", 48)
    body = {"messages": messages, "temperature": 0, "reasoning_effort": "none", **fields}
    reply = await client.post("/v1/chat/completions", json=body)
    reply.raise_for_status()
    return reply.json()


async def _rates(client: httpx.AsyncClient) -> dict[str, Any]:
    prefill = []
    for seed in range(3):
        usage = (await _chat(client, _needle(8000, seed)[0], max_tokens=1))["usage"]
        prefill.append(usage["samovar"]["computed_tokens"] / usage["samovar"]["prefill_seconds"])
    count = [{"role": "user", "content": "Count from 3 to 90."}]
    usage = (await _chat(client, count, max_tokens=400))["usage"]
    decode = (usage["completion_tokens"] - 1) / usage["samovar"]["decode_seconds"]
    return {"prefill tokens/s, 8K prompt": round(max(prefill)), "decode tokens/s, alone": round(decode, 1)}


def _needle(tokens: int, salt: int) -> tuple[list[dict[str, str]], str]:
    rng = random.Random(f"{tokens}/{salt}")
    code = f"{rng.choice(ANIMALS)}-{rng.randrange(1000, 9999)}"
    hay = " ".join(rng.choice(PANGRAMS) for _ in range(tokens))[: int(tokens * CHARS_PER_TOKEN)]
    at = int(len(hay) * 0.8)
    text = f"{hay[:at]}\n[the secret code is {code}]\n{hay[at:]}\n\n{QUESTION}"
    return [{"role": "system", "content": "You are a careful reader."}, {"role": "user", "content": text}], code


async def _needles(client: httpx.AsyncClient, tokens: int, salts: int) -> str:
    found = 0
    for salt in range(1000, 1000 + salts):
        messages, code = _needle(tokens, salt)
        answer = (await _chat(client, messages))["choices"][0]["message"]["content"]
        found += answer == code
    return f"{found} of {salts}"


async def _tool_calls(client: httpx.AsyncClient) -> dict[str, Any]:
    cases = [json.loads(line) for line in TOOL_CASES.read_text().splitlines()]
    places = asyncio.Semaphore(TOGETHER)

    async def ask(case: dict[str, Any]) -> dict[str, Any]:
        async with places:
            reply = await _chat(client, case["messages"], tools=case["tools"], max_tokens=200)
            return reply["choices"][0]

    choices = await asyncio.gather(*map(ask, cases))
    called = [[c["function"] for c in choice["message"].get("tool_calls") or ()] for choice in choices]
    well_formed = [
        bool(calls) and choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        for calls, choice in zip(called, choices, strict=True)
    ]
    exact = [_as_text(calls) == case["calls"] for calls, case in zip(called, cases, strict=True)]
    named = [
        [c["name"] for c in calls] == [c["name"] for c in case["calls"]]
        for calls, case in zip(called, cases, strict=True)
    ]
    return {
        "prompts": len(cases),
        "well formed": sum(well_formed) / len(cases),
        "function names right": sum(named) / len(cases),
        "exact": sum(exact) / len(cases),
    }


def _as_text(calls: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Arguments as the model writes them: strings as they are, everything else as JSON."""
    return [
        {
            "name": call["name"],
            "arguments": {
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in json.loads(call["arguments"]).items()
            },
        }
        for call in calls
    ]
