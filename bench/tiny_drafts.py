"""What the small model's MTP head drafts behind its own greedy output: the share that the model accepts.

The prompts (data/draft_prompts.jsonl, made by `python -m tools.train draft-prompts`) are of the kinds of the model
card's table: 200 tokens of held-out code and English to go on with, short chats, tool calls with held-out names. The
card tells how many tokens it counted (1,440 of code and of English), not with which prompts, and its sample is small:
with 24 prompts of code the standard error is 2 to 4 points. How long an output is matters where greedy text begins to
repeat itself, so code and English are counted over their first 60, 80, 120 and 160 tokens: 24, 18, 12 and 9 prompts of
such lengths give 1,440.

No one of these lengths agrees with the card for both kinds: code comes within 2 points at 80 tokens, English at 160,
and they were found by trying ten lengths against the card. So that they agree there proves nothing; which length the
card used is not known. What can be said with lengths fixed beforehand is in draft_samples.py.
"""

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.acceptance import Acceptance, Dialog, acceptance, accepted_drafts
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.cache.transfer import page_transfers
from services.engine.config import EngineConfig
from services.engine.core import EngineCore
from services.engine.mailbox import Message, StepResult, Submit
from services.engine.model.hybrid_config import HybridConfig
from services.engine.request import Request
from services.engine.runner import ModelRunner
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.weights.loader import LoadedModel, load_model
from services.protocol.generate import SamplingParams
from services.protocol.hashing import BLOCK_TOKENS
from tools.train.evaluation.draft_prompts import DRAFT_KINDS, DraftKind, load_prompts

MODEL = Path(__file__).parents[1] / "models" / "samovar-tiny"
PROMPTS = Path(__file__).with_name("data") / "draft_prompts.jsonl"
DRAFTS = 3
CARD: dict[DraftKind, tuple[float, float, float]] = {
    "code": (0.872, 0.781, 0.709),
    "English": (0.927, 0.869, 0.816),
    "chat": (0.999, 0.989, 0.945),
    "tool calls": (0.998, 0.994, 0.958),
}
"""Its column "own greedy output": drafts 1, 1 and 2, 1 to 3."""
LENGTHS: dict[DraftKind, tuple[int, ...]] = {
    "code": (60, 80, 120, 160),
    "English": (60, 80, 120, 160),
    "chat": (60,),
    "tool calls": (200,),
}
"""Tokens of output at most; what is counted by itself, the longest of which is decoded."""
TOGETHER = 16
END_OF_TURN = 4089


def load_small_model() -> LoadedModel:
    """In float32 on the CPU."""
    return load_model(EngineConfig(model=str(MODEL), device="cpu", dtype="float32"), lambda share, what: None)


def measure(model: LoadedModel, prompts: int | None = None) -> dict[str, Any]:
    """With the first `prompts` of each kind, or all."""
    measured: dict[str, Any] = {}
    for kind in DRAFT_KINDS:
        for length, found in measure_kind(model, kind, prompts).items():
            measured[f"{kind}, {length} tokens at most"] = {
                "accepted": [round(share, 4) for share in found.shares],
                "standard error": [round(error, 4) for error in found.errors],
                "card": list(CARD[kind]),
                "positions": found.positions,
                "dialogs": found.dialogs,
                "tokens a verify pass": round(found.tokens_a_pass, 2),
            }
            print(kind, length, found, flush=True)
    return measured


def measure_kind(model: LoadedModel, kind: DraftKind, prompts: int | None = None) -> dict[int, Acceptance]:
    """By the number of output tokens that count at most."""
    texts = [each.text for each in load_prompts(PROMPTS) if each.kind == kind][:prompts]
    accepted = accepted_in(model, answered(model, texts, max(LENGTHS[kind])))
    return {length: acceptance(first_tokens(accepted, length), DRAFTS) for length in LENGTHS[kind]}


def answered(model: LoadedModel, texts: Sequence[str], limit: int) -> list[Dialog]:
    """The model's greedy answers, of `limit` tokens at most."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    answers: list[list[int]] = []
    for first in range(0, len(prompts), TOGETHER):
        answers += greedy(model, prompts[first : first + TOGETHER], limit)
    return [Dialog(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def accepted_in(model: LoadedModel, dialogs: Sequence[Dialog]) -> list[list[int]]:
    """As `accepted_drafts`, a few dialogs at a time."""
    assert model.mtp is not None
    accepted: list[list[int]] = []
    for first in range(0, len(dialogs), TOGETHER):
        accepted += accepted_drafts(model.mtp, dialogs[first : first + TOGETHER], DRAFTS)
    return accepted


def first_tokens(accepted: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """What would have been counted had the answers ended after `length` tokens."""
    return [each[: length - DRAFTS] for each in accepted]


def greedy(model: LoadedModel, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """What the engine answers, the end of the turn included; all prompts at once."""
    config = model.model_config
    assert isinstance(config, HybridConfig)
    device = torch.device("cpu")
    count = sum(-(-(len(prompt) + limit + 1) // BLOCK_TOKENS) + 1 for prompt in prompts)
    pages = KvPages(KvLayout.of(config, torch.float32), count, device)
    states = StatePool(StateLayout.of(config, torch.float32), 2 * len(prompts), device)
    scheduler = Scheduler(
        SchedulerConfig(
            fingerprint=model.fingerprint,
            pages=count,
            max_model_len=4096,
            max_batch_tokens=2048,
            state_slots=states.count,
            state_bytes=states.state_bytes,
        )
    )
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}

    def deliver(result: StepResult) -> None:
        for _, delta in result.deltas:
            answers[delta.request_id] += delta.tokens

    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    runner = ModelRunner(model.model, pages, page_transfers(pages, states), device, states)
    core = EngineCore(scheduler, runner, inbox, deliver)
    sampling = SamplingParams(max_tokens=limit, temperature=0, stop_token_ids=(END_OF_TURN,))
    for name, prompt in zip(answers, prompts, strict=True):
        core.handle(Submit(Request(name, "bench", list(prompt), [], 0, sampling)))
    core.resume_at = 0.0
    while core.resume_at is not None:
        core.step()
    return list(answers.values())
