"""The promise, end to end: what was read once comes back from the kvstore."""

import json
import subprocess
import sys
from pathlib import Path

import httpx

from tests.e2e.stack import Stack, running, wait_until

SMALL = Path(__file__).parents[2] / "models" / "samovar-tiny"
WORDS = ["river", "stone", "lamp", "wheel", "garden", "paper", "window", "silver", "horse", "candle", "bridge", "cloud"]


def conversation(number: int) -> str:
    """About 512 tokens that share nothing with another conversation's, from the first block on."""
    lines = [f"{WORDS[number]} {i} {WORDS[(number * 5 + i) % 12]} {(number + 1) * (i + 7) % 97}" for i in range(62)]
    return f"{WORDS[number]}: remember this list. " + "; ".join(lines) + ". Which word comes first?"


def test_conversations_beyond_the_device_pool_come_back_also_behind_a_restart(tmp_path: Path) -> None:
    """A small model with recurrent states, 8 conversations of about 14 blocks, 40 pages and 12 states."""
    disk = f"{tmp_path / 'disk'}:1GiB"
    pool = {"SAMOVAR_KV_PAGES": "40", "SAMOVAR_STATES": "12"}
    options = ("--model", str(SMALL), "--kv-size", "256MiB", "--kv-disk", disk)
    cold = {}
    with running(tmp_path / "first", *options, **pool) as stack:
        for number in range(8):
            reply = stack.chat(conversation(number), max_tokens=8)
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] < 64
            cold[number] = reply["choices"][0]["message"]["content"]
        blocks = 8 * (reply["usage"]["prompt_tokens"] // 64)
        wait_until(
            "all blocks are written through", lambda: stack.metric("kvstore", "samovar_kvstore_objects") >= blocks
        )
        _all_cached(stack, cold, "cached_host")
        told = subprocess.run(
            [sys.executable, "-m", "services.cli", "cache", "--json", "--url", stack.url],
            capture_output=True,
            check=True,
        )
        (engine,) = json.loads(told.stdout)["engines"]
        runs = engine["tree"]["runs"]
        assert sum(run["host"] for run in runs) >= 0.9 * blocks * 64
        assert 0 < sum(run["device"] for run in runs) <= 40 * 64
    with running(tmp_path / "second", *options, **pool) as stack:
        wait_until("the disk is read back", lambda: stack.metric("kvstore", "samovar_kvstore_disk_objects") >= blocks)
        _all_cached(stack, cold, "cached_disk")
        assert stack.metric("kvstore", "samovar_kvstore_torn_total") == 0


def _all_cached(stack: Stack, answers: dict[int, str], tier: str) -> None:
    """Nothing is read again, most of it comes out of `tier`, and the answers are the same."""
    taken = 0
    for number in reversed(answers):
        reply = stack.chat(conversation(number), max_tokens=8)
        usage = reply["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.95 * usage["prompt_tokens"], (number, usage)
        assert reply["choices"][0]["message"]["content"] == answers[number]
        taken += usage["samovar"][tier] > 0
    assert taken >= len(answers) / 2


def test_a_killed_engine_comes_back_warm_and_engines_share_blocks(tmp_path: Path) -> None:
    with running(tmp_path, "--kv-size", "512MiB", "--engines", "2") as stack:
        prompt = conversation(3)
        first = stack.chat(prompt, max_tokens=8)
        wait_until("its blocks are written through", lambda: stack.metric("kvstore", "samovar_kvstore_objects") >= 8)
        for engine in ("engine-0", "engine-1"):
            dead = stack.kill(engine)
            wait_until("the supervisor has restarted it", lambda e=engine, d=dead: stack.pid(e) != d)
        again = wait_until("an engine answers", lambda: _answer(stack, prompt), 90)
        assert again["usage"]["samovar"]["cached_host"] >= 448
        assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]


def _answer(stack: Stack, prompt: str) -> dict | None:
    """None while no engine is there."""
    try:
        return stack.chat(prompt, max_tokens=8)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != 503:
            raise
        return None
