"""How many drafts of a model's own MTP head the model would accept."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch import Row
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.model.context import forward_context
from services.engine.model.mtp import DraftRow, MtpHead, draft
from services.engine.model.qwen3_5 import HybridDecoder
from services.protocol.hashing import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Dialog:
    prompt: Sequence[int]
    output: Sequence[int]
    """The model's own greedy answer, its end-of-turn token included where it came to one."""


def hidden_states(decoder: HybridDecoder, ids: Sequence[int]) -> Tensor:
    """[len(ids), hidden] behind the final norm, in one chunk with a cache of its own."""
    count = -(-len(ids) // BLOCK_TOKENS)
    pages = KvPages(KvLayout.of(decoder.config, decoder.dtype), count, decoder.device)
    states = StatePool(StateLayout.of(decoder.config, decoder.dtype), 1, decoder.device)
    row = Row("", ids, 0, range(count), 0, sample=None, state=0)
    context = forward_context([row], pages, states, decoder.device)
    return decoder.normed(decoder.body(torch.tensor(ids, device=decoder.device), context))


@torch.inference_mode()
def draft_acceptance(head: MtpHead, dialogs: Sequence[Dialog], drafts: int = 3) -> list[float]:
    """The share of output positions where drafts 1..k all equal the model's greedy choice, for each k. Drafted anew
    behind every token, with the keys that an engine has there (see `draft`); counted are the positions whose drafts
    all stand for tokens of the output."""
    rows = [[*dialog.prompt, *dialog.output] for dialog in dialogs]
    hidden = [hidden_states(head.decoder, ids) for ids in rows]
    chosen = [head.decoder.logits(each).argmax(-1).tolist() for each in hidden]
    page_count = [-(-(len(ids) + drafts) // BLOCK_TOKENS) for ids in rows]
    pages = KvPages(head.kv_layout, sum(page_count), head.decoder.device)
    tables = [range(sum(page_count[:n]), sum(page_count[: n + 1])) for n in range(len(rows))]

    agreed, counted = [0] * drafts, 0
    # The token behind position `at` is known, the drafts stand for those at `at` + 2 and on.
    at = [len(dialog.prompt) - 1 for dialog in dialogs]
    start = [0] * len(rows)
    while running := [n for n, ids in enumerate(rows) if at[n] < len(ids) - 1 - drafts]:
        batch = [
            DraftRow(start[n], hidden[n][start[n] : at[n] + 1], rows[n][start[n] + 1 : at[n] + 2], tables[n])
            for n in running
        ]
        for n, proposed in zip(running, draft(head, pages, batch, drafts).tolist(), strict=True):
            counted += 1
            for k, token in enumerate(proposed):
                if token != chosen[n][at[n] + 1 + k]:
                    break
                agreed[k] += 1
            at[n] += 1
            start[n] = at[n]
    return [count / max(1, counted) for count in agreed]
