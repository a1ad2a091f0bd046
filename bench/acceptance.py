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


@dataclass(frozen=True, slots=True)
class Acceptance:
    shares: tuple[float, ...]
    """Of the positions: where drafts 1..k all equal the model's greedy choice, for each k."""
    errors: tuple[float, ...]
    """Their standard errors, with each dialog as one draw: positions of one text are no independent ones."""
    positions: int
    dialogs: int

    @property
    def tokens_a_pass(self) -> float:
        """What a verify pass brings: its own token and the accepted drafts."""
        return 1 + sum(self.shares)


def hidden_states(decoder: HybridDecoder, ids: Sequence[int]) -> Tensor:
    """[len(ids), hidden] behind the final norm, in one chunk with a cache of its own."""
    count = -(-len(ids) // BLOCK_TOKENS)
    pages = KvPages(KvLayout.of(decoder.config, decoder.dtype), count, decoder.device)
    states = StatePool(StateLayout.of(decoder.config, decoder.dtype), 1, decoder.device)
    row = Row("", ids, 0, range(count), 0, sample=None, state=0)
    context = forward_context([row], pages, states, decoder.device)
    return decoder.normed(decoder.body(torch.tensor(ids, device=decoder.device), context))


@torch.inference_mode()
def accepted_drafts(head: MtpHead, dialogs: Sequence[Dialog], drafts: int = 3) -> list[list[int]]:
    """For each dialog and each position of its output whose drafts all stand for tokens of the output: how many leading
    drafts equal the model's greedy choice. Drafted anew behind every token, with the keys that an engine has there (see
    `draft`). The first position is that of the output's first token."""
    rows = [[*dialog.prompt, *dialog.output] for dialog in dialogs]
    hidden = [hidden_states(head.decoder, ids) for ids in rows]
    chosen = [head.decoder.logits(each).argmax(-1).tolist() for each in hidden]
    page_count = [-(-(len(ids) + drafts) // BLOCK_TOKENS) for ids in rows]
    pages = KvPages(head.kv_layout, sum(page_count), head.decoder.device)
    tables = [range(sum(page_count[:n]), sum(page_count[: n + 1])) for n in range(len(rows))]

    accepted: list[list[int]] = [[] for _ in rows]
    # The token behind position `at` is known, the drafts stand for those at `at` + 2 and on.
    at = [len(dialog.prompt) - 1 for dialog in dialogs]
    start = [0] * len(rows)
    while running := [n for n, ids in enumerate(rows) if at[n] < len(ids) - 1 - drafts]:
        batch = [
            DraftRow(start[n], hidden[n][start[n] : at[n] + 1], rows[n][start[n] + 1 : at[n] + 2], tables[n])
            for n in running
        ]
        for n, proposed in zip(running, draft(head, pages, batch, drafts).tolist(), strict=True):
            wanted = chosen[n][at[n] + 1 : at[n] + 1 + drafts]
            agreed = 0
            while agreed < drafts and proposed[agreed] == wanted[agreed]:
                agreed += 1
            accepted[n].append(agreed)
            at[n] += 1
            start[n] = at[n]
    return accepted


def acceptance(accepted: Sequence[Sequence[int]], drafts: int) -> Acceptance:
    """Of what `accepted_drafts` gave; dialogs that are too short for a position do not count. Raises ValueError where
    that leaves fewer than two."""
    counted = [each for each in accepted if each]
    if len(counted) < 2:
        raise ValueError("at least two dialogs with a position are needed")
    positions = sum(map(len, counted))
    shares, errors = [], []
    for k in range(1, drafts + 1):
        agreed = [sum(each >= k for each in dialog) for dialog in counted]
        share = sum(agreed) / positions
        spread = sum((a - share * len(dialog)) ** 2 for a, dialog in zip(agreed, counted, strict=True))
        shares.append(share)
        errors.append((spread * len(counted) / (len(counted) - 1)) ** 0.5 / positions)
    return Acceptance(tuple(shares), tuple(errors), positions, len(counted))


def draft_acceptance(head: MtpHead, dialogs: Sequence[Dialog], drafts: int = 3) -> list[float]:
    """The shares alone."""
    return list(acceptance(accepted_drafts(head, dialogs, drafts), drafts).shares)
