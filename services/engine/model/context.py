"""From the rows of a step to what the forward pass needs to know of them."""

from collections.abc import Sequence

import torch

from kernels.attention import plan_attention
from kernels.state_plan import plan_recurrence
from services.engine.batch import Row
from services.engine.cache.pages import KvPages
from services.engine.cache.states import StatePool
from services.engine.model.layers import ForwardContext, RecurrentContext
from services.protocol.hashing import BLOCK_TOKENS


def forward_context(
    rows: Sequence[Row], pages: KvPages, states: StatePool | None, device: torch.device
) -> ForwardContext:
    """The rows' tokens follow each other in the order of the rows; rows without tokens take part in nothing but the
    logits. Raises IndexError for a row whose state slot does not exist."""
    running = [row for row in rows if row.tokens]
    counts = torch.tensor([len(row.tokens) for row in running], dtype=torch.int64)
    starts = torch.tensor([row.start for row in running], dtype=torch.int64)
    ends = counts.cumsum(0)
    row_of = torch.arange(len(running)).repeat_interleave(counts)
    positions = torch.arange(len(row_of)) - (ends - counts)[row_of] + starts[row_of]

    write_from = torch.tensor([row.write_from for row in running], dtype=torch.int64)
    table = torch.tensor([page for row in running for page in row.pages], dtype=torch.int64)
    sizes = torch.tensor([len(row.pages) for row in running], dtype=torch.int64)
    first_page = (sizes.cumsum(0) - sizes)[row_of]
    places = table[first_page + positions // BLOCK_TOKENS]
    places = torch.where(positions >= write_from[row_of], places, -1)

    last = ends - 1
    return ForwardContext(
        positions=positions.to(device),
        attention=plan_attention(
            counts.tolist(),
            [row.start + len(row.tokens) for row in running],
            [row.pages for row in running],
            BLOCK_TOKENS,
            pages.blank,
            device,
        ),
        cache=pages.layers,
        pages=places.to(device),
        offsets=(positions % BLOCK_TOKENS).to(device),
        outputs=last[torch.tensor([row.sample is not None for row in running], dtype=torch.bool)].to(device),
        recurrent=None if states is None else _recurrent(rows, running, counts.tolist(), states, device),
    )


def begin(rows: Sequence[Row], pages: KvPages, states: StatePool | None) -> None:
    """What is to be done before the rows run: pages and states that they begin hold nothing of their former owners'."""
    pages.clear(begun_pages(rows))
    if states is not None:
        states.clear([row.state for row in rows if row.start == 0 and row.tokens])


def begun_pages(rows: Sequence[Row]) -> list[int]:
    """The pages whose first token is written in this step: what they hold belongs to nobody any more."""
    begun: list[int] = []
    for row in rows:
        first = -(-max(row.start, row.write_from) // BLOCK_TOKENS)
        begun += row.pages[first : -(-(row.start + len(row.tokens)) // BLOCK_TOKENS)]
    return begun


def _recurrent(
    rows: Sequence[Row], running: Sequence[Row], counts: Sequence[int], states: StatePool, device: torch.device
) -> RecurrentContext:
    for row in rows:
        states.check(row.state)
    slots = [row.state for row in running]
    last = torch.tensor(counts, dtype=torch.int64).cumsum(0) - 1
    sampled = [row.state for row in rows if row.sample is not None]
    return RecurrentContext(
        plan=plan_recurrence(counts, slots, device),
        states=states.states,
        columns=states.columns,
        hidden=states.hidden,
        last=last.to(device),
        slots=torch.tensor(slots, dtype=torch.int64).to(device),
        sampled=torch.tensor(sampled, dtype=torch.int64).to(device),
    )
