"""The small model with recurrent states in each dtype, under the scheduler on the CPU."""

from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

from services.engine.config import EngineConfig, StateDtype
from services.engine.weights.fingerprint import fingerprint
from services.engine.weights.loader import load_model
from services.engine.weights.opening import open_model
from services.engine.weights.resolve import resolve
from tests.engine.preempting import preempt
from tests.engine.test_tiny_resume import ANSWER, Engine, context, loaded
from tests.engine.tiny_prompts import MODEL, prompts, tokenizer

CPU = torch.device("cpu")
HINTS = (100, 270, 325)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def engine(state_dtype: StateDtype, chunk: int = 4096) -> Engine:
    return Engine(chunk, CPU, state_dtype=state_dtype)


def test_a_chat_in_half_states() -> None:
    """Greedy answers up to their end, the same text as with states in float32."""
    end = tokenizer().encode("<|im_end|>", add_special_tokens=False).ids[0]
    half = engine("float16")
    told = 0
    for number, text in enumerate(prompts("chat", 4)):
        ids = tokenizer().encode(text, add_special_tokens=False).ids
        answers = [each.serve(f"c{number}", ids, most=48, stop=(end,)) for each in (engine("float32"), half)]
        assert answers[0] == answers[1]
        told += len(answers[0])
    assert told > 40


@lru_cache
def cold(state_dtype: StateDtype) -> tuple[int, ...]:
    return tuple(engine(state_dtype).serve("cold", context(1, 330), HINTS))


@pytest.mark.parametrize("way", ["resumed", "restored", "preempted"])
@pytest.mark.parametrize("state_dtype", ["float16", "bfloat16"])
def test_every_way_gives_the_same_tokens(state_dtype: StateDtype, way: str) -> None:
    here = engine(state_dtype, 70 if way == "preempted" else 4096)
    prompt = context(1, 330)
    if way != "preempted":
        here.serve("before", prompt[:270], most=1)
    if way == "restored":
        here.push_out()
    here.submit("this", prompt, HINTS)
    here.step()
    if way == "preempted":
        while (sequence := here.scheduler._active["this"]).computed < 335:
            here.step()
        preempt(here.scheduler, sequence)
    here.run()
    assert tuple(here.told["this"]) == cold(state_dtype)
    assert len(cold(state_dtype)) == ANSWER
    usage = here.usages["this"]
    assert (usage.cached_device, usage.cached_host) == {"resumed": (270, 0), "restored": (0, 270)}.get(way, (0, 0))
    assert usage.preemptions == (way == "preempted")


def test_checkpoints_are_shared_in_one_dtype_only() -> None:
    given = EngineConfig(model=str(MODEL), device="cpu", dtype="float32", state_dtype="float16")
    checkpoint = open_model(resolve(str(MODEL)))
    names = [fingerprint(checkpoint, torch.float32, state_dtype=kind) for kind in ("float32", "float16", "bfloat16")]
    assert names[0] == loaded(CPU).fingerprint
    assert names[1] == load_model(given, lambda share, what: None).fingerprint
    assert len(set(names)) == 3


def test_a_model_without_states_ignores_the_setting() -> None:
    checkpoint = open_model(resolve(""))
    wide, half = (fingerprint(checkpoint, torch.float32, state_dtype=kind) for kind in ("float32", "float16"))
    assert wide == half
