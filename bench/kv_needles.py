"""Needles at 32K of the small model, by KV format, on a CPU: minutes a format, so not among `kv-formats`, whose file
they go to."""

import time
from functools import partial

from tokenizers import Tokenizer

from bench import results
from bench.kv_formats import MODEL
from bench.results import Entry
from bench.scoring import is_greedy
from kernels.kv_codec import KvFormat
from services.engine.config import EngineConfig
from services.engine.weights.loader import load_model
from tools.train.evaluation.needles import needle_case

FORMATS: tuple[KvFormat, ...] = ("bf16", "rk4v4-e8")
LENGTH, SALTS = 32768, 12


def main() -> None:
    model = load_model(EngineConfig(model=str(MODEL), device="cpu", dtype="float32"), lambda share, what: None)
    tokenizer = Tokenizer.from_str(model.bundle.tokenizer_json)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    found = dict.fromkeys(FORMATS, 0)
    for salt in range(SALTS):
        prompt, answer = (encode(part).ids for part in needle_case(tokenizer, LENGTH, salt))
        for format in FORMATS:
            begin = time.monotonic()
            found[format] += is_greedy(model.model, prompt, answer, format)
            print(f"{format}: {found[format]} of {salt + 1}, {time.monotonic() - begin:.0f} s", flush=True)
    entries = [Entry(f"needles/{format}/{LENGTH}", count / SALTS, "share exact") for format, count in found.items()]
    print(f"written to {results.merge_entries('kv-formats-cpu', entries)}")
