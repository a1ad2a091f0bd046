"""What storing K and V in fewer bits costs, on a CPU: bytes, the error of attention on drawn K and V, and the small
model's perplexity, catastrophic positions and needles. docs/kv-formats.md says what to make of it.

The model runs in float32 with weights as they are, so that nothing but K and V differs. "auto" is float32 K and V: what
the others are compared with. Texts are those of `python -m bench perplexity`, which the model was never trained on.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import get_args

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench import kv_attention, kv_quantizers, results
from bench.results import Entry
from bench.scoring import is_greedy, log_probabilities
from kernels.kv_codec import KvFormat, kv_form
from services.engine.config import EngineConfig
from services.engine.weights.loader import LoadedModel, load_model
from tools.train.evaluation.draft_prompts import DraftKind, load_prompts
from tools.train.evaluation.needles import needle_case

MODEL = Path(__file__).resolve().parents[1] / "models" / "samovar-tiny"
PROMPTS = Path(__file__).with_name("data") / "draft_prompts.jsonl"
FORMATS: tuple[KvFormat, ...] = get_args(KvFormat)
DEPTHS = {1024: 8, 32768: 3, 131072: 3}
"""Draws by depth in tokens."""
ROTATION_DEPTH = 32768
LAYERS, KV_HEADS, HEAD_DIM = 16, 4, 256
"""Of the 27B, for the bytes a token."""
KINDS: tuple[DraftKind, ...] = ("code", "English", "tool calls")
PASSAGES = 16
"""Behind each other in one pass: 3,200 tokens of prose or code, 5,400 of tool calls."""
PASSES = 4
"""Of each kind, at most."""
CATASTROPHE = 2.0
"""Nats that the loss of a position goes up by."""
NEEDLES = {2048: 20, 8192: 8}
"""Salts by prompt length in tokens."""


def main() -> None:
    entries: list[Entry] = []
    for entry in chain(byte_counts(), quantizer_errors(), rotation_errors(), attention_errors(), of_the_model()):
        print(f"{entry.name}: {entry.value} {entry.unit}", flush=True)
        entries.append(entry)
    print(f"written to {results.write_entries('kv-formats-cpu', entries)}")


def byte_counts() -> Iterator[Entry]:
    plain = kv_form("bf16", torch.bfloat16).row_bytes(HEAD_DIM)
    for format in FORMATS:
        if format != "auto":
            row = kv_form(format, torch.bfloat16).row_bytes(HEAD_DIM)
            yield Entry(f"bytes/{format}", LAYERS * KV_HEADS * row, "bytes a token of the 27B", round(row / plain, 4))


def quantizer_errors() -> Iterator[Entry]:
    for name, kind, error in kv_quantizers.squared_errors():
        yield Entry(f"quantizer/{name}/{kind}", round(error, 6), "squared error of the energy")


def attention_errors() -> Iterator[Entry]:
    for depth, draws in DEPTHS.items():
        sums = dict.fromkeys(FORMATS, 0.0)
        for seed in range(draws):
            sequence = kv_attention.draw(depth, seed)
            exact = kv_attention.attend(sequence, "auto")
            for format in FORMATS:
                sums[format] += kv_attention.relative_error(kv_attention.attend(sequence, format), exact)
        for format in FORMATS:
            if format != "auto":
                yield Entry(f"attention/{format}/{depth}", round(sums[format] / draws, 5), "relative error")


def rotation_errors() -> Iterator[Entry]:
    sums: dict[str, float] = {}
    for seed in range(DEPTHS[ROTATION_DEPTH]):
        for name, error in kv_attention.rotations(kv_attention.draw(ROTATION_DEPTH, seed)):
            sums[name] = sums.get(name, 0.0) + error
    for name, total in sums.items():
        yield Entry(
            f"rotation/{name}/{ROTATION_DEPTH}",
            round(total / DEPTHS[ROTATION_DEPTH], 5),
            "relative error of 4-bit integers",
        )


def of_the_model() -> Iterator[Entry]:
    model = load_model(EngineConfig(model=str(MODEL), device="cpu", dtype="float32"), lambda share, what: None)
    tokenizer = Tokenizer.from_str(model.bundle.tokenizer_json)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    texts = {kind: [encode(text).ids for text in passes(kind)] for kind in KINDS}
    cases = {
        length: [[encode(part).ids for part in needle_case(tokenizer, length, salt)] for salt in range(salts)]
        for length, salts in NEEDLES.items()
    }
    before: dict[DraftKind, Tensor] = {}
    for format in FORMATS:
        for kind in KINDS:
            lost = torch.cat([losses(model, ids, format) for ids in texts[kind]])
            exact = before.setdefault(kind, lost)
            ratio = round((lost - exact).mean().exp().item(), 5)
            yield Entry(f"perplexity/{format}/{kind}", round(lost.mean().exp().item(), 4), "perplexity", ratio)
            count = int((lost > exact + CATASTROPHE).sum())
            yield Entry(f"catastrophes/{format}/{kind}", count, f"of {len(lost)} positions")
        for length, prompts in cases.items():
            found = sum(is_greedy(model.model, prompt, answer, format) for prompt, answer in prompts)
            yield Entry(f"needles/{format}/{length}", found / len(prompts), "share exact")


def passes(kind: DraftKind) -> list[str]:
    passages = [passage.text for passage in load_prompts(PROMPTS) if passage.kind == kind]
    joined = ["\n\n".join(passages[first : first + PASSAGES]) for first in range(0, len(passages), PASSAGES)]
    return joined[:PASSES]


def losses(model: LoadedModel, ids: Sequence[int], format: KvFormat) -> Tensor:
    """float32 [len(ids) - 1], nats: of each token but the first."""
    found = log_probabilities(model.model, ids, kv_format=format)[:-1]
    return -found.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
