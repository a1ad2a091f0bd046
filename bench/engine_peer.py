"""The peer: `transformers` with flash-linear-attention, bfloat16, the same shape, on the same device."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from bench.random_model import SPREAD, fill
from bench.results import Entry

NAME = "transformers-bf16"
_WARM_STEPS, _STEPS = 3, 20
_TIMES = 3


class NoPeer(Exception):
    """It cannot run here; the message says why, for people."""


@torch.inference_mode()
def peer(
    raw: Mapping[str, Any], dtype: torch.dtype, device: torch.device, prefills: Sequence[int], depths: Sequence[int]
) -> Iterator[Entry]:
    """Prefill of prompts of so many tokens, and decode of one sequence behind so many. Raises NoPeer."""
    try:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise NoPeer(f"transformers has no Qwen3.5 here: {error}") from None
    if device.type == "cuda" and importlib.util.find_spec("fla") is None:
        raise NoPeer("without flash-linear-attention it would be slow for no fault of its own")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device, no_init_weights():
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**raw)).eval()
    finally:
        torch.set_default_dtype(before)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, SPREAD)
        else:
            fill(name, parameter)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(0, raw["vocab_size"], (1, count), device=device)

    def seconds(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        _wait(device)
        return time.perf_counter() - begin

    for tokens in prefills:
        prompt = ids(tokens)
        taken = [seconds(lambda p=prompt: model(p, use_cache=True, logits_to_keep=1)) for _ in range(1 + _TIMES)]
        yield Entry(f"prefill/{NAME}/{tokens}", round(tokens / median(taken[1:]), 1), "tokens/s")
    for depth in depths:
        answer = model(ids(depth), use_cache=True, logits_to_keep=1)
        taken = []
        for _ in range(_WARM_STEPS + _STEPS):
            begin = time.perf_counter()
            token = answer.logits[:, -1:].argmax(-1)
            answer = model(token, past_key_values=answer.past_key_values, use_cache=True)
            _wait(device)
            taken.append(time.perf_counter() - begin)
        yield Entry(f"decode/{NAME}/depth{depth}/batch1", round(1 / median(taken[_WARM_STEPS:]), 1), "tokens/s")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
