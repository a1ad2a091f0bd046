"""Paged attention against attention written down again, position by position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import paged_attention, plan_attention
from kernels.kv_codec import plain_layer
from tests.devices import DEVICES

PAGE = 4
BLANK = 24


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [T, heads, dim] are the last T positions of k, v [S, kv_heads, dim]."""
    out = torch.empty_like(q)
    past = len(k) - len(q)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        for head in range(q.shape[1]):
            keys, values = k[: past + i + 1, head // group], v[: past + i + 1, head // group]
            out[i, head] = torch.softmax(keys @ q[i, head] * scale, 0) @ values
    return out


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_batch(device: torch.device, rows: list[tuple[int, int]], kv_heads: int, group: int, seed: int) -> None:
    """(queries, tokens before them) of each sequence, in pages drawn at random; the pool belongs to two layers."""
    generator = torch.Generator().manual_seed(seed)
    dim = 8
    pool = torch.randn(BLANK + 1, 2, 2, PAGE, kv_heads, dim, generator=generator)
    pool[BLANK] = 0
    keys, values = pool[:, 1, 0], pool[:, 1, 1]
    order = torch.randperm(BLANK, generator=generator).tolist()
    counts = [count for count, _ in rows]
    contexts = [count + past for count, past in rows]
    # Sequences may share pages; a table may be longer than the context needs.
    tables = [
        [order[(3 * n + i) % BLANK] for i in range(-(-context // PAGE) + n % 2)] for n, context in enumerate(contexts)
    ]
    q = torch.randn(sum(counts), kv_heads * group, dim, generator=generator)

    plan = plan_attention(counts, contexts, tables, PAGE, BLANK, device)
    out = paged_attention(q.to(device), plain_layer(keys.to(device), values.to(device)), plan, scale=0.3).cpu()

    first = 0
    for count, context, table in zip(counts, contexts, tables, strict=True):
        k = keys[table].flatten(0, 1)[:context]
        v = values[table].flatten(0, 1)[:context]
        expected = plain(q[first : first + count], k, v, 0.3)
        torch.testing.assert_close(out[first : first + count], expected, atol=1e-5, rtol=1e-4)
        first += count


def test_single_queries_of_similar_length_go_together() -> None:
    contexts = [5, 4 * PAGE, 3 * PAGE, 1, 9 * PAGE, 30 * PAGE]
    tables = [list(range(30))] * 6
    plan = plan_attention([1] * 6, contexts, tables, PAGE, BLANK, torch.device("cpu"))
    assert plan.spans == ()
    assert [group.queries.tolist() for group in plan.groups] == [[3, 0], [2, 1], [4], [5]]
    assert plan.groups[0].pages.tolist() == [[0, BLANK], [0, 1]]
    assert plan.groups[0].seen[:, 0, 0].sum(-1).tolist() == [1, 5]
