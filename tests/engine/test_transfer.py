import gc
import weakref
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.batch import Transfer
from services.engine.cache import transfer as module
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.transfer import PageTransfers, page_transfers
from services.protocol.kv import Extent
from tests.devices import DEVICES
from tests.engine.arenas import arena

# 15,360 bytes: three pieces of 4096 and a rest.
LAYOUT = KvLayout(layers=3, kv_heads=1, head_dim=20, dtype=torch.bfloat16)
SIZE = LAYOUT.page_bytes
UNIT = 4096
CPU = torch.device("cpu")


def random_pages(device: torch.device, count: int = 6, seed: int = 0) -> KvPages:
    """Every byte random: NaNs of all kinds must survive."""
    pages = KvPages(LAYOUT, count, device)
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        pages.page(index).copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator))
    return pages


def content(pages: KvPages, index: int) -> bytes:
    return bytes(pages.page(index).cpu().numpy())


def wait(transfers: PageTransfers) -> tuple[list[int], list[int]]:
    done: list[int] = []
    failed: list[int] = []
    while True:
        progress = transfers.poll()
        done += progress.done
        failed += progress.failed
        if not progress.pending:
            return sorted(done), sorted(failed)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_into_extents_is_byte_exact(device: torch.device, data: st.DataObject) -> None:
    """Store a page to scattered extents, in any order of places, and load it to another page."""
    cuts = [0, *sorted(UNIT * n for n in data.draw(st.sets(st.integers(1, SIZE // UNIT), max_size=3))), SIZE]
    places = data.draw(st.permutations(range(8)))
    extents = tuple(
        Extent(place * 4 * UNIT, end - start) for place, start, end in zip(places, cuts, cuts[1:], strict=False)
    )
    pages = random_pages(device)
    store = arena(8 * 4 * UNIT, fill=0xA5)
    expected = content(pages, 4)
    transfers = page_transfers(pages)
    transfers.start([Transfer(1, "store", 4, store, extents)])
    assert wait(transfers) == ([1], [])
    assert b"".join(bytes(store.view[e.offset : e.offset + e.length]) for e in extents) == expected
    untouched = bytes(store.view).count(0xA5) - expected.count(0xA5)
    assert untouched == store.size - SIZE

    others = [content(pages, index) for index in range(6)]
    transfers.start([Transfer(2, "load", 0, store, extents)])
    assert wait(transfers) == ([2], [])
    assert content(pages, 0) == expected
    assert [content(pages, index) for index in range(1, 6)] == others[1:]
    transfers.close()


@pytest.mark.parametrize("device", DEVICES)
def test_pieces_of_the_arena_do_not_show(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that lies across the border of two page-locked pieces."""
    monkeypatch.setattr(module, "_PIECE", 2 * UNIT)
    pages = random_pages(device)
    store = arena(16 * UNIT)
    transfers = page_transfers(pages)
    transfers.start([Transfer(n, "store", n, store, (Extent((1 + 4 * n) * UNIT, SIZE),)) for n in range(3)])
    assert wait(transfers) == ([0, 1, 2], [])
    for n in range(3):
        start = (1 + 4 * n) * UNIT
        assert bytes(store.view[start : start + SIZE]) == content(pages, n)
    transfers.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("page", "extents"),
    [
        (0, (Extent(0, SIZE - 1),)),
        (0, (Extent(0, SIZE), Extent(4 * UNIT, UNIT))),
        (0, ()),
        (0, (Extent(7 * UNIT, SIZE),)),
        (0, (Extent(-UNIT, SIZE),)),
        (0, (Extent(0, SIZE + UNIT), Extent(0, -UNIT))),
        (6, (Extent(0, SIZE),)),
    ],
    ids=["short", "long", "none", "over the end", "negative offset", "negative length", "blank page"],
)
def test_what_does_not_fit_fails_alone_and_touches_nothing(
    device: torch.device, page: int, extents: tuple[Extent, ...]
) -> None:
    pages = random_pages(device)
    store = arena(8 * UNIT, fill=0x11)
    before = pages.tensor.view(torch.uint8).clone()
    transfers = page_transfers(pages)
    good = Transfer(2, "store", 1, arena(SIZE), (Extent(0, SIZE),))
    transfers.start([Transfer(1, "load", page, store, extents), good, Transfer(3, "store", page, store, extents)])
    assert wait(transfers) == ([2], [1, 3])
    assert torch.equal(pages.tensor.view(torch.uint8), before)
    assert bytes(store.view) == b"\x11" * store.size
    assert bytes(good.arena.view) == content(pages, 1)
    transfers.close()


def test_each_result_is_reported_once() -> None:
    pages = random_pages(CPU)
    transfers = page_transfers(pages)
    transfers.start([Transfer(5, "store", 0, arena(SIZE), (Extent(0, SIZE),))])
    assert transfers.poll().done == (5,)
    assert transfers.poll().done == ()


@pytest.mark.parametrize("device", DEVICES)
def test_an_arena_is_let_go_with_its_last_user(device: torch.device) -> None:
    """A kvstore that was restarted often must not leave its old memory mapped here."""
    pages = random_pages(device)
    transfers = page_transfers(pages)
    gone = []
    for n in range(3):
        store = arena(4 * UNIT)
        transfers.start([Transfer(n, "store", n, store, (Extent(0, SIZE),))])
        assert wait(transfers) == ([n], [])
        gone.append((weakref.ref(store), weakref.ref(store.view.obj)))
        del store
    gc.collect()
    assert all(made() is None and mapping() is None for made, mapping in gone)
    transfers.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_are_ordered_with_compute() -> None:
    """A store reads what long-running compute before it wrote; a load overwrites only after it was read."""
    pages = random_pages(torch.device("cuda"))
    store = arena(8 * UNIT)
    transfers = page_transfers(pages)
    for value in range(1, 20):
        store.view[4 * UNIT : 4 * UNIT + SIZE] = bytes([value + 100]) * SIZE
        torch.cuda._sleep(20_000_000)
        pages.page(0).fill_(value)
        torch.cuda._sleep(20_000_000)
        seen = pages.page(1).clone()
        expected = pages.page(1).clone() if value == 1 else torch.full_like(seen, value + 99)
        transfers.start(
            [
                Transfer(1, "store", 0, store, (Extent(0, SIZE),)),
                Transfer(2, "load", 1, store, (Extent(4 * UNIT, SIZE),)),
            ]
        )
        assert wait(transfers) == ([1, 2], [])
        assert bytes(store.view[:SIZE]) == bytes([value]) * SIZE
        assert torch.equal(seen, expected)
    transfers.close()


@pytest.mark.parametrize("kind", ["store", "load"])
def test_what_is_not_locked_goes_by_way_of_other_memory(
    kind: Literal["store", "load"], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the arena's pieces the second cannot be locked, and no other one is tried after it. The copies are those that
    a CUDA device would be asked for, between tensors of the host."""
    tried: list[int] = []

    class Runtime:
        def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
            tried.append(size)
            return 712 if len(tried) == 2 else 0

        def cudaHostUnregister(self, pointer: int) -> int:
            return 0

    monkeypatch.setattr(module, "_PIECE", 2 * UNIT)
    monkeypatch.setattr(module, "_cuda", Runtime)
    monkeypatch.setattr(module, "_forget_error", lambda device: None)
    pages, store = random_pages(CPU), arena(8 * UNIT, fill=3)
    begin = UNIT
    store.view[begin : begin + SIZE] = content(pages, 1)
    transfer = Transfer(1, kind, 0, store, (Extent(begin, SIZE),))
    arenas = module._Arenas(torch.device("cuda"))
    copies = list(arenas.copies([pages.page(0)], transfer))
    assert [(len(copy.host), copy.staged) for copy in copies] == [
        (UNIT, False),
        (2 * UNIT, True),
        (SIZE - 3 * UNIT, True),
    ]
    assert tried == [2 * UNIT, 2 * UNIT]
    assert caplog.text.count("cannot page-lock") == 1
    expected = content(pages, 0 if kind == "store" else 1)
    for copy in copies:
        copy.enqueue()
    assert content(pages, 0) == bytes(store.view[begin : begin + SIZE]) == expected
    assert set(store.view[:begin]) == set(store.view[begin + SIZE :]) == {3}
    arenas.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_work_from_memory_that_cannot_be_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Runtime:
        def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(module, "_cuda", Runtime)
    pages = random_pages(torch.device("cuda"))
    transfers = page_transfers(pages)
    store = arena(8 * UNIT)
    transfers.start([Transfer(n, "store", n, store, (Extent(n * 4 * UNIT, SIZE),)) for n in range(2)])
    assert wait(transfers) == ([0, 1], [])
    assert bytes(store.view[4 * UNIT : 4 * UNIT + SIZE]) == content(pages, 1)
    assert caplog.text.count("cannot page-lock") == 1
    transfers.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("before", [UNIT, 8 * UNIT])
def test_a_failed_lock_is_nobody_elses_error(before: int, caplog: pytest.LogCaptureFixture) -> None:
    """CUDA refuses to lock memory twice, and keeps that as the thread's last error for the next kernel to report.

    before: bytes of the arena that are locked already."""
    device = torch.device("cuda")
    pages = random_pages(device)
    transfers = page_transfers(pages)
    store = arena(8 * UNIT)
    locked = torch.frombuffer(store.view, dtype=torch.uint8).data_ptr()
    assert int(module._cuda().cudaHostRegister(locked, before, 0)) == 0
    try:
        transfers.start([Transfer(1, "store", 0, store, (Extent(0, SIZE),))])
        torch.full((3,), 2.0, device=device).sum().item()
        assert wait(transfers) == ([1], [])
        assert "cannot page-lock" in caplog.text
        assert bytes(store.view[:SIZE]) == content(pages, 0)
        transfers.close()
    finally:
        module._cuda().cudaHostUnregister(locked)
