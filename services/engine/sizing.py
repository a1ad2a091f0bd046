"""The two sides of a memory plan: what a model takes, from its files, and what the settings want."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

import msgspec
import torch

from services.engine.cache.pages import KvLayout, plan_pages
from services.engine.cache.states import StateLayout, plan_states
from services.engine.config import EngineConfig, KvFormat
from services.engine.memory_advice import Alternative, plan
from services.engine.memory_plan import MemoryPlan, Sizes, Wish
from services.engine.model.config import ModelError
from services.engine.model.family import DecoderConfig
from services.engine.model.gated_delta_net import inner_dtype
from services.engine.model.hybrid_config import HybridConfig
from services.engine.weights import recipes
from services.engine.weights.footprint import Footprint, footprint
from services.engine.weights.loader import resolve_dtype, stays_packed
from services.engine.weights.recipes import Recipe
from services.engine.weights.source import QuantizedSource
from services.engine.workspace import Device, workspace
from services.settings import SettingsError, variable

CHUNKS: Mapping[Device, tuple[int, ...]] = {"cpu": (512,), "cuda": (8192, 4096, 2048, 1024, 512)}
"""Tokens of a step where SAMOVAR_MAX_BATCH_TOKENS does not say."""
CUDA_BYTES = 512 * 2**20
"""That the driver's context and the code of the kernels take of a GPU, beside what PyTorch allocates."""


def sizes(
    source: QuantizedSource,
    config: EngineConfig,
    device: torch.device,
    drafts: bool = False,
    recipe: Recipe | None = None,
) -> Sizes:
    """Of the model as the engine would serve it on such a device, which need not exist. `drafts`: with pages for the
    head for multi-token prediction; `recipe`: as packed by it. Raises ModelError, and SettingsError for a KV format
    that cannot hold the model's heads."""
    held = _footprint(source, config, device, recipe)
    if drafts and not held.draft:
        raise ModelError(f"{source.path} has no head for multi-token prediction: leave --spec out")
    return _sizes(source.config, config, device, drafts, held)


def _footprint(source: QuantizedSource, config: EngineConfig, device: torch.device, recipe: Recipe | None) -> Footprint:
    return footprint(source, resolve_dtype(config, device), stays_packed(config, device), recipe)


def _sizes(model: DecoderConfig, config: EngineConfig, device: torch.device, drafts: bool, held: Footprint) -> Sizes:
    dtype = resolve_dtype(config, device)
    layout = KvLayout.of(model, dtype, config.kv_format)
    hybrid = isinstance(model, HybridConfig)
    return Sizes(
        weights=held.decoder,
        draft=held.draft,
        page=layout.page_bytes,
        draft_page=replace(layout, layers=1).page_bytes if drafts else 0,
        state=StateLayout.of(model, dtype, config.state_dtype).state_bytes if hybrid else 0,
        context=model.context_length,
        workspace=workspace(
            model,
            dtype.itemsize,
            inner_dtype(dtype).itemsize,
            "cuda" if device.type == "cuda" else "cpu",
            "coded" if layout.form.keys.scale_count(model.head_dim) else "plain",
            held.tile,
        ),
        kv_format=layout.form.name,
        state_dtype=config.state_dtype,
    )


def alternatives(
    source: QuantizedSource,
    config: EngineConfig,
    device: torch.device,
    drafts: bool = False,
    recipe: Recipe | None = None,
) -> Iterator[Alternative]:
    """The same model in each other KV format that can hold its heads, with states of half the size where it has any,
    and by each other recipe of ours."""
    held = _footprint(source, config, device, recipe)
    for format in get_args(KvFormat):
        other = msgspec.structs.replace(config, kv_format=format)
        try:
            if format not in ("auto", config.kv_format):
                yield f"{variable('kv_format')}={format}", _sizes(source.config, other, device, drafts, held)
        except SettingsError:
            continue  # heads of too few dims
    if isinstance(source.config, HybridConfig) and config.state_dtype == "float32":
        half = msgspec.structs.replace(config, state_dtype="float16")
        yield f"{variable('state_dtype')}=float16", _sizes(source.config, half, device, drafts, held)
    for name in recipes.names():
        by = recipes.load(name)
        if by != recipe:
            yield f"{variable('recipe')}={name}", sizes(source, config, device, drafts, by)


def wish(source: QuantizedSource, config: EngineConfig, device: torch.device, total: int | None) -> Wish:
    """What an engine with this model wants of `total` bytes on such a device, for one session; None: as much as the
    pools take that a host without a limit gets. Raises ModelError for a context that the model does not have, and
    SettingsError for pools that hold nothing."""
    cuda = device.type == "cuda"
    dtype = resolve_dtype(config, device)
    most = source.config.context_length
    if config.max_model_len > most:
        raise ModelError(f"SAMOVAR_MAX_MODEL_LEN={config.max_model_len}: the model was made for {most} tokens at most")
    wanted = Wish(
        total=total,
        context=config.max_model_len or most,
        must=bool(config.max_model_len),
        chunks=(config.max_batch_tokens,) if config.max_batch_tokens else CHUNKS["cuda" if cuda else "cpu"],
        running=config.max_running,
        pages=config.kv_pages,
        states=config.states,
        device=CUDA_BYTES if cuda and config.vram else 0,
    )
    if total is None or config.kv_memory or config.kv_pages:
        # The pool's size is said, and requests are as long as it allows.
        layout = KvLayout.of(source.config, dtype, config.kv_format)
        wanted = replace(wanted, pages=plan_pages(config, layout), must=False)
    if total is None and isinstance(source.config, HybridConfig):
        wanted = replace(wanted, states=plan_states(config, StateLayout.of(source.config, dtype, config.state_dtype)))
    return wanted


def total_bytes(config: EngineConfig, device: torch.device) -> int | None:
    """Of the device, for all that the process takes there: SAMOVAR_VRAM, but no more than a GPU has free; without it
    what the GPU has free, and None on a host."""
    if device.type != "cuda":
        return int(config.vram) or None
    free = torch.cuda.mem_get_info(device)[0]
    return min(int(config.vram), free + CUDA_BYTES) if config.vram else free


def cap(config: EngineConfig, device: torch.device) -> None:
    """Let PyTorch allocate no more on a GPU than SAMOVAR_VRAM leaves it, so that a small card is rehearsed on a large
    one. To be called before anything is allocated there. Raises SettingsError for less than the driver takes."""
    if device.type != "cuda" or not config.vram:
        return
    left = int(config.vram) - CUDA_BYTES
    if left <= 0:
        raise SettingsError(f"SAMOVAR_VRAM={config.vram}: CUDA alone takes {CUDA_BYTES} bytes; write more")
    there = torch.cuda.get_device_properties(device).total_memory
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(min(1.0, left / there), index)


def engine_plan(source: QuantizedSource, config: EngineConfig, device: torch.device) -> MemoryPlan:
    """Of all that an engine with this model will take on `device`, before any of it is there. Raises ModelError, and
    SettingsError (`DoesNotFit`) naming what to change."""
    wanted = wish(source, config, device, total_bytes(config, device))
    return plan(sizes(source, config, device), wanted, lambda: alternatives(source, config, device))
