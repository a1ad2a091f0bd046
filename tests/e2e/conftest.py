"""Stacks shared by the tests of this folder; whoever breaks one for good starts their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import cases, stack

SCRIPT = Path(__file__).with_name("script.jsonl")
TINY = Path(__file__).parents[2] / "models" / "samovar-tiny"


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stack.Stack]:
    """The default model, as `make up` serves it."""
    with stack.running(tmp_path_factory.mktemp("smollm"), "--kv-size", "256MiB") as running:
        yield running


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stack.Stack]:
    """A scripted engine with a short queue, which also plays the cases."""
    home = tmp_path_factory.mktemp("scripted")
    script = home / "script.jsonl"
    script.write_text("".join(f"{line}\n" for line in [*SCRIPT.read_text().splitlines(), *cases.script()]))
    options = ("--model", f"scripted:{script}", "--engines", "1", "--kv-size", "64MiB")
    settings = {"SAMOVAR_MAX_RUNNING": "8", "SAMOVAR_MAX_QUEUE": "8", "SAMOVAR_KEEPALIVE": "0.5"}
    with stack.running(home, *options, **settings) as running:
        yield running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stack.Stack]:
    """The family's small model on the CPU: two places, and steps of a prefill that are small."""
    options = ("--model", str(TINY), "--device", "cpu", "--max-model-len", "5120", "--kv-pages", "90")
    settings = {"SAMOVAR_MAX_RUNNING": "2", "SAMOVAR_MAX_BATCH_TOKENS": "130", "SAMOVAR_THREADS": "1"}
    with stack.running(tmp_path_factory.mktemp("tiny"), *options, "--kv-size", "256MiB", **settings) as running:
        yield running
