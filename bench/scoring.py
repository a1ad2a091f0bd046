"""How probable a model finds given tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.batch import Row
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.config import KvFormat
from services.engine.model.context import forward_context
from services.engine.model.dense import DenseDecoder
from services.engine.model.qwen3_5 import HybridDecoder
from services.protocol.hashing import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Score:
    """Of a text of at least two tokens."""

    log_probabilities: Tensor
    """float32 [tokens - 1, vocabulary]: before each token but the first."""
    perplexity: float

    @classmethod
    def of(cls, log_probabilities: Tensor, ids: Sequence[int]) -> "Score":
        """`log_probabilities`: behind each token of `ids`."""
        before = log_probabilities[:-1]
        loss = -before.gather(1, torch.tensor(ids[1:])[:, None]).mean()
        return cls(before, math.exp(loss.item()))

    def divergence_from(self, base: "Score") -> float:
        """Mean over the tokens of KL(base, this), in nats."""
        total = torch.nn.functional.kl_div(
            self.log_probabilities, base.log_probabilities, log_target=True, reduction="batchmean"
        )
        return total.item()


@torch.inference_mode()
def log_probabilities(
    model: DenseDecoder | HybridDecoder, ids: Sequence[int], first: int = 0, kv_format: KvFormat = "auto"
) -> Tensor:
    """Of all tokens behind each of ids[first:], float32 [tokens, vocabulary], on the CPU; in one pass without a cache
    from before. What a token reads of the others is of `kv_format`."""
    count = -(-len(ids) // BLOCK_TOKENS)
    pages = KvPages(KvLayout.of(model.config, model.dtype, kv_format), count, model.device)
    tokens = torch.tensor(ids, device=model.device)
    if isinstance(model, HybridDecoder):
        states = StatePool(StateLayout.of(model.config, model.dtype), 1, model.device)
        context = forward_context([_row(ids, count, 0)], pages, states, model.device)
        logits = model.logits(model.normed(model.body(tokens, context)[first:]))
    else:
        context = forward_context([_row(ids, count, -1)], pages, None, model.device)
        outputs = torch.arange(first, len(ids), device=model.device)
        logits = model.forward(tokens, replace(context, outputs=outputs))
    return logits.log_softmax(-1).cpu()


def is_greedy(
    model: DenseDecoder | HybridDecoder, prompt: Sequence[int], answer: Sequence[int], kv_format: KvFormat = "auto"
) -> bool:
    """Whether greedy decoding behind the prompt gives the answer."""
    found = log_probabilities(model, [*prompt, *answer], len(prompt) - 1, kv_format)
    return found[:-1].argmax(-1).tolist() == list(answer)


def _row(ids: Sequence[int], pages: int, state: int) -> Row:
    return Row("", ids, 0, range(pages), 0, sample=None, state=state)
