import pytest
import torch

from services.engine.cache.pages import KvLayout, KvPages, plan_pages
from services.engine.config import EngineConfig
from services.settings import ByteSize, SettingsError

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=8, dtype=torch.float32)
CPU = torch.device("cpu")


def test_a_page_is_contiguous_and_holds_all_layers() -> None:
    pages = KvPages(LAYOUT, 4, CPU)
    assert LAYOUT.page_bytes == 3 * 2 * 64 * 2 * 8 * 4
    assert pages.page(2).shape == (LAYOUT.page_bytes,)
    pages.page(2).fill_(0xFF)
    assert bool((pages.tensor[2] == 0xFF).all())
    for layer in pages.layers:
        assert bool(layer.keys.codes[2].isnan().all() and layer.values.codes[2].isnan().all())
    assert bool((pages.tensor[[0, 1, 3, 4]] == 0).all())


@pytest.mark.parametrize("index", [-1, 4, 5])
def test_the_blank_page_and_others_cannot_be_transferred(index: int) -> None:
    with pytest.raises(IndexError):
        KvPages(LAYOUT, 4, CPU).page(index)


def test_clear() -> None:
    pages = KvPages(LAYOUT, 4, CPU)
    pages.tensor[:] = 0xFF
    pages.clear([])
    pages.clear([3, 1])
    assert bool((pages.tensor[[1, 3]] == 0).all())
    assert bool((pages.tensor[[0, 2]] == 0xFF).all())


def test_plan() -> None:
    size = LAYOUT.page_bytes
    assert plan_pages(EngineConfig(kv_pages=17), LAYOUT) == 17
    # The blank page counts: memory is the limit of all that is taken.
    assert plan_pages(EngineConfig(kv_memory=ByteSize(10 * size + 1)), LAYOUT) == 9
    assert plan_pages(EngineConfig(), LAYOUT) == 2**30 // size - 1
    with pytest.raises(SettingsError, match=rf"SAMOVAR_KV_MEMORY.*takes {2 * size} at least"):
        plan_pages(EngineConfig(kv_memory=ByteSize(2 * size - 1)), LAYOUT)


def test_layouts_that_differ_are_told_apart() -> None:
    others = [
        KvLayout(4, 2, 8, torch.float32),
        KvLayout(3, 1, 8, torch.float32),
        KvLayout(3, 2, 16, torch.float32),
        KvLayout(3, 2, 8, torch.bfloat16),
    ]
    assert len({layout.describe() for layout in [LAYOUT, *others]}) == 5
