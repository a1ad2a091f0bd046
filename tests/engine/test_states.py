"""Slots of recurrent states, and their way to the kvstore's arena and back."""

from dataclasses import replace

import pytest
import torch

from services.engine.batch import Copy, Row, SampleSpec, ScheduledBatch, Transfer
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool, plan_states
from services.engine.cache.transfer import page_transfers
from services.engine.config import EngineConfig, StateDtype
from services.protocol.kv import Extent
from services.settings import SettingsError
from tests.devices import DEVICES
from tests.engine.arenas import arena
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.test_runner import finish
from tests.engine.test_transfer import wait
from tests.engine.tiny_models import GREEDY, Bench, decoder, random_ids, row

LAYOUT = StateLayout(
    layers=3, value_heads=2, key_dim=5, value_dim=7, past=3, channels=11, hidden=13, dtype=torch.bfloat16
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_slot_is_one_piece_and_its_parts_do_not_overlap(device: torch.device, state_dtype: torch.dtype) -> None:
    layout = replace(LAYOUT, state_dtype=state_dtype)
    pool = StatePool(layout, 4, device)
    assert (pool.states.dtype, pool.columns.dtype, pool.hidden.dtype) == (state_dtype, *[torch.bfloat16] * 2)
    assert pool.states.shape == (4, 3, 2, 5, 7)
    assert pool.columns.shape == (4, 3, 3, 11)
    assert pool.hidden.shape == (4, 13)
    parts = (pool.states, pool.columns, pool.hidden)
    for number, part in enumerate(parts, 1):
        part[2] = number
    for number, part in enumerate(parts, 1):
        assert bool((part[2] == number).all())
    used = sum(part[2].numel() * part.element_size() for part in parts)
    filled = pool.slot(2).clone()
    assert len(filled) == layout.state_bytes >= used
    pool.clear([2])
    assert not pool.tensor.any()
    # The bytes of a slot are all there is: moved to another slot they mean the same.
    pool.slot(0).copy_(filled)
    for number, part in enumerate(parts, 1):
        assert bool((part[0] == number).all())
        assert not part[1:].any()


@pytest.mark.parametrize("index", [-1, 4])
def test_a_slot_that_is_not_handed_out(index: int) -> None:
    with pytest.raises(IndexError, match=rf"state {index} of 4"):
        StatePool(LAYOUT, 4, CPU).slot(index)


def test_layouts_that_differ_are_told_apart() -> None:
    names = {
        StateLayout(*values).describe()
        for values in (
            (3, 2, 5, 7, 3, 11, 13, torch.bfloat16),
            (3, 2, 7, 5, 3, 11, 13, torch.bfloat16),
            (3, 2, 5, 7, 2, 11, 13, torch.bfloat16),
            (3, 2, 5, 7, 3, 11, 13, torch.float32),
            (2, 2, 5, 7, 3, 11, 13, torch.bfloat16),
            (3, 2, 5, 7, 3, 11, 13, torch.bfloat16, torch.bfloat16),
            (3, 2, 5, 7, 3, 11, 13, torch.bfloat16, torch.float16),
            (3, 2, 5, 7, 3, 11, 13, torch.float16),
        )
    }
    assert len(names) == 8


def test_number_of_slots() -> None:
    assert plan_states(EngineConfig(states=3), LAYOUT) == 3
    assert plan_states(EngineConfig(max_running=10), LAYOUT) == 266
    large = StateLayout(48, 48, 128, 128, 3, 10240, 5120, torch.bfloat16)  # the 27B's
    assert large.state_bytes == pytest.approx(151e6 + 2.95e6 + 10240, rel=1e-3)
    assert plan_states(EngineConfig(), large) == 2**30 // large.state_bytes == 6
    half = replace(large, state_dtype=torch.float16)
    assert large.state_bytes - half.state_bytes == 48 * 48 * 128 * 128 * 2
    assert plan_states(EngineConfig(), half) == 13
    huge = StateLayout(480, 48, 128, 128, 3, 10240, 5120, torch.bfloat16)
    with pytest.raises(SettingsError, match="SAMOVAR_STATES: 1073741824 bytes hold no state"):
        plan_states(EngineConfig(), huge)
    assert plan_states(EngineConfig(states=1), huge) == 1


PAGES = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype=torch.bfloat16)
STATE, PAGE = LAYOUT.state_bytes, PAGES.page_bytes


def random_pools(device: torch.device) -> tuple[KvPages, StatePool]:
    pages, states = KvPages(PAGES, 4, device), StatePool(LAYOUT, 4, device)
    generator = torch.Generator().manual_seed(0)
    for tensor in (pages.tensor.view(torch.uint8), states.tensor):
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator))
    return pages, states


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", [256, STATE - 256, STATE, STATE + 256])
@pytest.mark.parametrize("with_page", [True, False])
def test_transfer_of_a_checkpoint(device: torch.device, cut: int, with_page: bool) -> None:
    """State, then tail page; the extents are cut before, at and behind the border between them."""
    pages, states = random_pools(device)
    size = STATE + (PAGE if with_page else 0)
    if cut >= size:
        cut = size // 512 * 256
    store = arena(4 * (STATE + PAGE), fill=0x5A)
    extents = (Extent(2 * (STATE + PAGE), cut), Extent(0, size - cut))
    page = {True: (1, 3), False: (-1, -1)}[with_page]
    state_bytes = bytes(states.slot(2).cpu().numpy())
    page_bytes = bytes(pages.page(1).cpu().numpy()) if with_page else b""
    transfers = page_transfers(pages, states)
    transfers.start([Transfer(1, "store", page[0], store, extents, state=2)])
    assert wait(transfers) == ([1], [])
    stored = b"".join(bytes(store.view[e.offset : e.offset + e.length]) for e in extents)
    assert stored == state_bytes + page_bytes
    before = pages.tensor.view(torch.uint8).clone(), states.tensor.clone()
    transfers.start([Transfer(2, "load", page[1], store, extents, state=0)])
    assert wait(transfers) == ([2], [])
    assert bytes(states.slot(0).cpu().numpy()) == state_bytes
    assert torch.equal(states.tensor[1:], before[1][1:])
    if with_page:
        assert bytes(pages.page(3).cpu().numpy()) == page_bytes
    assert torch.equal(pages.tensor.view(torch.uint8)[:3], before[0][:3])
    transfers.close()


@pytest.mark.parametrize(
    ("page", "state", "size"),
    [(0, 4, STATE + PAGE), (4, 0, STATE + PAGE), (-1, -1, PAGE), (-1, 0, STATE + PAGE), (0, 0, STATE), (0, 0, PAGE)],
)
def test_transfer_that_does_not_fit(page: int, state: int, size: int) -> None:
    pages, states = random_pools(CPU)
    before = pages.tensor.view(torch.uint8).clone(), states.tensor.clone()
    transfers = page_transfers(pages, states)
    store = arena(STATE + PAGE)
    transfers.start([Transfer(1, "load", page, store, (Extent(0, size),), state)])
    assert wait(transfers) == ([], [1])
    assert torch.equal(pages.tensor.view(torch.uint8), before[0])
    assert torch.equal(states.tensor, before[1])
    without = page_transfers(pages)
    without.start([Transfer(2, "load", 0, store, (Extent(0, STATE + PAGE),), state=0)])
    assert wait(without) == ([], [2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state_dtype", ["float32", "float16", "bfloat16"])
def test_an_offloaded_checkpoint_gives_the_same_answer(device: torch.device, state_dtype: StateDtype) -> None:
    """Compute, take a checkpoint inside a page, store it, lose all, restore elsewhere, go on: the same bits."""
    model = decoder(hybrid_oracle("dense"), device)
    ids = random_ids(150, seed=4)
    cold = Bench(model, state_dtype=state_dtype)
    at_checkpoint = cold.run(row(ids, 0, 100, [0, 1], state=0)).clone()
    expected = cold.run(row(ids, 100, 150, [0, 1, 2], state=0)).clone()

    bench = Bench(model, state_dtype=state_dtype)
    assert bench.states is not None
    assert bench.states.states.dtype == getattr(torch, state_dtype)
    bench.run(
        row(ids, 0, 100, [6, 4], samples=False, state=3),
        after=(Copy("state", 3, 8), Copy("page", 4, 12)),
    )
    state, page = bench.states.state_bytes, bench.pages.page_bytes
    store = arena(state + 2 * page)
    block, checkpoint = (Extent(0, page),), (Extent(page, state + page),)
    stores = (Transfer(0, "store", 6, store, block), Transfer(1, "store", 12, store, checkpoint, state=8))
    other = random_ids(10, seed=5)
    bench.run(row(other, 0, 10, [9], "other", state=1), transfers=stores)
    assert finish(bench) == [0, 1]
    bench.pages.tensor[: bench.pages.count] = 0xFF  # NaNs
    bench.states.tensor.fill_(0xFF)
    loads = (Transfer(2, "load", 11, store, block), Transfer(3, "load", 5, store, checkpoint, state=7))
    bench.output = bench.runner.run(ScheduledBatch(bench.output.step + 1, (), loads))
    assert finish(bench) == [2, 3]
    repeat = Row("r", (), 100, [11, 3], 100, SampleSpec(GREEDY, ids[:100], []), 2)
    assert torch.equal(bench.run(repeat, before=(Copy("state", 7, 2), Copy("page", 5, 3))), at_checkpoint)
    assert torch.equal(bench.run(row(ids, 100, 150, [11, 3, 8], state=2)), expected)
    bench.runner.close()
