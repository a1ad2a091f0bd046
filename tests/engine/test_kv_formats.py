"""The small model with K and V in each format: pages are bytes to whatever moves them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import get_args

import pytest
import torch

from bench.acceptance import Dialog, draft_acceptance
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.config import EngineConfig, KvFormat
from services.engine.weights.loader import LoadedModel, load_model
from services.settings import SettingsError
from tests.engine.preempting import preempt
from tests.engine.test_tiny_resume import ANSWER, PAGES, Engine, context
from tests.engine.tiny_prompts import MODEL, prompts, tokenizer

FORMATS: tuple[KvFormat, ...] = get_args(KvFormat)
STORED = tuple(format for format in FORMATS if format != "auto")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@lru_cache
def loaded(format: KvFormat) -> LoadedModel:
    config = EngineConfig(model=str(MODEL), device="cpu", dtype="float32", kv_format=format)
    return load_model(config, lambda share, what: None)


@lru_cache
def cold(prompt: tuple[int, ...], format: KvFormat) -> tuple[int, ...]:
    return tuple(Engine(4096, CPU, format).serve("cold", prompt))


@lru_cache
def tool_calls() -> list[Dialog]:
    stop = tokenizer().encode("<|im_end|>", add_special_tokens=False).ids[0]
    rows = [tokenizer().encode(text, add_special_tokens=False).ids for text in prompts("tools", 2)]
    return [Dialog(row, Engine(4096, CPU).serve("tools", row, most=60, stop=(stop,))) for row in rows]


@pytest.mark.parametrize("way", ["resumed", "restored", "preempted"])
@pytest.mark.parametrize("format", STORED)
def test_every_way_gives_the_same_tokens(format: KvFormat, way: str) -> None:
    engine = Engine(70 if way == "preempted" else 4096, CPU, format)
    prompt = context(1, 330)
    if way in ("resumed", "restored"):
        engine.serve("before", prompt[:270], most=1)
    if way == "restored":
        engine.push_out()
    engine.submit("this", prompt, hints=(100, 270, 325))
    engine.step()
    if way == "preempted":
        while (sequence := engine.scheduler._active["this"]).computed < 335:
            engine.step()
        preempt(engine.scheduler, sequence)
    engine.run()
    assert tuple(engine.told["this"]) == cold(prompt, format)
    assert len(cold(prompt, format)) == ANSWER
    usage = engine.usages["this"]
    found = {"resumed": (270, 0), "restored": (0, 270)}.get(way, (0, 0))
    assert (usage.cached_device, usage.cached_host) == found
    assert usage.preemptions == (way == "preempted")


@pytest.mark.parametrize("format", ["fp8", "rk4v4-e8"])
def test_drafts_from_the_head_s_own_pages(format: KvFormat) -> None:
    """The head's K and V are of the format too, and its drafts are hardly worse for it."""
    plain, head = loaded("auto").mtp, loaded(format).mtp
    assert plain is not None
    assert head is not None
    assert head.kv_layout.form.name == format
    assert head.kv_layout.page_bytes == KvLayout.of(head.decoder.config, torch.float32, format).page_bytes // 2
    (exact,), (found,) = (draft_acceptance(each, tool_calls(), 1) for each in (plain, head))
    assert exact > 0.95
    assert found > exact - 0.05


def test_a_page_is_as_large_as_its_format_says() -> None:
    config = loaded("auto").model_config
    for format, size in zip(FORMATS, (512, 256, 132, 132, 102, 72, 68, 68, 52), strict=True):
        layout = KvLayout.of(config, torch.float32, format)
        assert layout.page_bytes == 2 * 64 * 2 * size
        pages = KvPages(layout, PAGES, CPU)
        assert pages.tensor.shape == (PAGES + 1, layout.page_bytes)
        assert len(pages.layers) == 2


def test_blocks_are_shared_in_one_format_only() -> None:
    config = loaded("auto").model_config
    described = [KvLayout.of(config, torch.float32, format).describe() for format in FORMATS]
    assert len(set(described)) == len(FORMATS)
    fingerprints = [loaded(format).fingerprint for format in ("auto", "fp8", "rk4v4-e8")]
    assert len(set(fingerprints)) == 3
    # "auto" is no format of its own.
    assert KvLayout.of(config, torch.bfloat16).describe() == KvLayout.of(config, torch.bfloat16, "bf16").describe()


def test_heads_that_a_format_cannot_hold() -> None:
    config = replace(loaded("auto").model_config, head_dim=80)
    with pytest.raises(SettingsError, match=r"SAMOVAR_KV_FORMAT=rk4v4-e8: takes heads of a multiple of 64 .* have 80"):
        KvLayout.of(config, torch.bfloat16, "rk4v4-e8")
    assert KvLayout.of(config, torch.bfloat16, "fp8").page_bytes
