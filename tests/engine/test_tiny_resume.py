"""models/samovar-tiny under the scheduler: whichever way a context comes to the device, the answer is the same.

On CUDA in float32 as well: there pages and states move on side streams while other requests compute.
"""

import queue
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

import pytest
import torch

from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.cache.transfer import page_transfers
from services.engine.config import EngineConfig, KvFormat, StateDtype
from services.engine.core import EngineCore
from services.engine.mailbox import Message, StepResult, Submit
from services.engine.model.hybrid_config import HybridConfig
from services.engine.request import Request
from services.engine.runner import ModelRunner
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.step_inputs import Bucket
from services.engine.weights.loader import LoadedModel, load_model
from services.protocol.generate import SamplingParams, Usage
from services.protocol.hashing import BLOCK_TOKENS
from tests.devices import DEVICES
from tests.engine.preempting import preempt
from tests.engine.tiny_prompts import MODEL, prompts, tokenizer
from tests.fakes import FakeKv

PAGES, SLOTS = 24, 16
ANSWER = 12


@lru_cache
def loaded(device: torch.device) -> LoadedModel:
    kind = "cuda" if device.type == "cuda" else "cpu"
    return load_model(EngineConfig(model=str(MODEL), device=kind, dtype="float32"), lambda share, what: None)


@lru_cache
def context(seed: int, length: int) -> tuple[int, ...]:
    """Token ids of several prompts behind each other."""
    texts = [*prompts("tools", 4), *prompts("chat", 4), *prompts("code", 4)]
    random.Random(seed).shuffle(texts)
    return tuple(tokenizer().encode("\n".join(texts * 4), add_special_tokens=False).ids[:length])


class Engine:
    """Core, scheduler and runner on one thread, with a store under the test's control."""

    def __init__(
        self,
        chunk: int,
        device: torch.device,
        kv_format: KvFormat = "auto",
        state_dtype: StateDtype = "float32",
        captured: bool = True,
    ) -> None:
        """With `captured` up to four requests decode in steps that start before the last one's tokens are known."""
        model = loaded(device)
        assert isinstance(model.model_config, HybridConfig)
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        pages = KvPages(KvLayout.of(model.model_config, torch.float32, kv_format), PAGES, device)
        states = StatePool(StateLayout.of(model.model_config, torch.float32, state_dtype), SLOTS, device)
        self.store = FakeKv(self.inbox, 64, True, pages.page_bytes, states.state_bytes)
        self.store.connect()
        config = SchedulerConfig(
            fingerprint=model.fingerprint,
            pages=PAGES,
            max_model_len=4096,
            max_batch_tokens=chunk,
            page_bytes=pages.page_bytes,
            state_slots=SLOTS,
            state_bytes=states.state_bytes,
        )
        self.scheduler = Scheduler(config, self.store)
        runner = ModelRunner(model.model, pages, page_transfers(pages, states), device, states)
        if captured:
            runner.decodes.capture([Bucket(4, PAGES * BLOCK_TOKENS)], 600.0, lambda share, what: None)
        self.decodes = runner.decodes
        self.core = EngineCore(self.scheduler, runner, self.inbox, self.take)
        self.told: dict[str, list[int]] = {}
        self.usages: dict[str, Usage] = {}

    def take(self, result: StepResult) -> None:
        for _, delta in result.deltas:
            self.told[delta.request_id] += delta.tokens
            if delta.usage is not None:
                self.usages[delta.request_id] = delta.usage

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        hints: tuple[int, ...] = (),
        most: int = ANSWER,
        stop: tuple[int, ...] = (),
    ) -> None:
        self.told[name] = []
        sampling = SamplingParams(max_tokens=most, temperature=0, stop_token_ids=stop)
        self.inbox.put(Submit(Request(name, "gateway", list(prompt), [], 0, sampling, hints=hints)))

    def step(self) -> bool:
        if self.inbox.empty() and self.core.resume_at is None:
            return False
        while not self.inbox.empty():
            self.core.handle(self.inbox.get())
        self.core.step()
        return True

    def run(self) -> None:
        while self.step():
            pass
        self.scheduler.check_integrity()

    def serve(
        self,
        name: str,
        prompt: Sequence[int],
        hints: tuple[int, ...] = (),
        most: int = ANSWER,
        stop: tuple[int, ...] = (),
    ) -> list[int]:
        self.submit(name, prompt, hints, most, stop)
        self.run()
        return self.told[name]

    def push_out(self) -> None:
        """Fill the device with something else."""
        for seed in range(3):
            self.serve(f"filler{seed}", [seed + 5] * (64 * PAGES // 2), most=1)


@lru_cache
def cold(prompt: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
    return tuple(Engine(4096, device, captured=False).serve("cold", prompt))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("chunk", [70, 4096])
@pytest.mark.parametrize("way", ["cold", "resumed", "restored"])
def test_every_way_gives_the_same_tokens(
    way: str, chunk: int, others: int, preempted: bool, device: torch.device
) -> None:
    engine = Engine(chunk, device)
    prompt = context(1, 330)
    if way != "cold":
        engine.serve("before", prompt[:270], most=1)
    if way == "restored":
        engine.push_out()
    engine.submit("this", prompt, hints=(100, 270, 325))
    for index in range(others):
        engine.submit(f"other{index}", context(2 + index, 90 + 40 * index))
    engine.step()
    for moment in (280, 335) if preempted else ():
        while (sequence := engine.scheduler._active["this"]).computed < moment:
            engine.step()
        preempt(engine.scheduler, sequence)
    engine.run()
    assert tuple(engine.told["this"]) == cold(prompt, device)
    for index in range(others):
        assert tuple(engine.told[f"other{index}"]) == cold(context(2 + index, 90 + 40 * index), device)
    usage = engine.usages["this"]
    found = {"cold": (0, 0), "resumed": (270, 0), "restored": (0, 270)}[way]
    assert (usage.cached_device, usage.cached_host, usage.computed_tokens) == (*found, 330 - sum(found))
    assert usage.preemptions == 2 * preempted


@pytest.mark.parametrize("device", DEVICES)
def test_an_exact_repeat_computes_nothing_and_says_the_same(device: torch.device) -> None:
    engine = Engine(4096, device)
    prompt = context(1, 330)
    for name in ("first", "second"):
        assert tuple(engine.serve(name, prompt)) == cold(prompt, device)
    assert engine.usages["second"].computed_tokens == 0


@pytest.mark.parametrize("device", DEVICES)
def test_many_go_on_from_one_checkpoint_at_once(device: torch.device) -> None:
    engine = Engine(4096, device)
    shared = context(1, 230)
    ends = [context(10 + index, 20 + index) for index in range(6)]
    engine.serve("before", shared, most=1)
    for index, end in enumerate(ends):
        engine.submit(f"r{index}", shared + end)
    engine.run()
    for index, end in enumerate(ends):
        assert tuple(engine.told[f"r{index}"]) == cold(shared + end, device)
        assert engine.usages[f"r{index}"].cached_device == 230


@pytest.mark.parametrize("device", DEVICES)
def test_a_conversation_is_read_once(device: torch.device) -> None:
    engine = Engine(4096, device)
    talk, known = context(1, 200), 0
    for turn in range(4):
        answer = engine.serve(f"t{turn}", talk)
        assert tuple(answer) == cold(talk, device)
        assert engine.usages[f"t{turn}"].cached_device == known
        known = len(talk) + len(answer) - 1
        talk = (*talk, *answer, *context(20 + turn, 70))
