"""Builds what an engine consists of, from its settings: the model or the script, pages, scheduler, runner, kvstore.

The one place that knows all parts. Runs on a thread of its own, since loading takes seconds to minutes.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.engine.cache.kvstore_client import KvClient
from services.engine.config import EngineConfig
from services.engine.core import EngineCore
from services.engine.mailbox import KvAnswer, KvConnected, Message, StepResult
from services.engine.memory_plan import size
from services.engine.model.config import ModelError
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.scripted import VOCABULARY, ScriptedRunner, ScriptError, load_script, scripted_bundle
from services.engine.tokenizer_chunks import TokenizerChunks
from services.protocol.events import ModelCard
from services.protocol.hashing import BLOCK_TOKENS

log = logging.getLogger(__name__)

SCRIPTED = "scripted:"
SCRIPTED_CONTEXT = 131_072
SCRIPTED_PAGES = 16_384
"""A million tokens: page numbers only, the scripted engine keeps nothing in them."""
SCRIPTED_BATCH_TOKENS = 8192

KV_CONNECT_SECONDS = 2.0
"""Before a new engine calls itself ready: its first request should find what an earlier engine left in the store."""

Progress = Callable[[float, str], None]


class CannotLoad(Exception):
    """The model cannot be served with these settings; the message is one line for people."""


@dataclass(frozen=True, slots=True)
class Assembly:
    card: ModelCard
    chunks: TokenizerChunks
    inbox: "queue.SimpleQueue[Message]"
    core: Callable[[Callable[[StepResult], None]], EngineCore]
    """Makes the core, given where its results go. Called once."""
    kv: KvClient | None

    def close(self) -> None:
        """After the core has ended."""
        if self.kv is not None:
            self.kv.close()


def assemble(config: EngineConfig, progress: Progress) -> Assembly:
    """Load everything; `progress` is called on the caller's thread. Raises CannotLoad or SettingsError."""
    try:
        if config.model.startswith(SCRIPTED):
            return _scripted(config)
        return _model(config, progress)
    except (ModelError, ScriptError) as error:
        raise CannotLoad(str(error)) from error


def _scripted(config: EngineConfig) -> Assembly:
    script = load_script(config.model.removeprefix(SCRIPTED))
    pages = config.kv_pages or SCRIPTED_PAGES
    scheduler = SchedulerConfig(
        fingerprint=script.fingerprint,
        pages=pages,
        max_model_len=min(config.max_model_len or SCRIPTED_CONTEXT, pages * BLOCK_TOKENS),
        max_batch_tokens=config.max_batch_tokens or SCRIPTED_BATCH_TOKENS,
        max_running=config.max_running,
        max_queue=config.max_queue,
    )
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    chunks = TokenizerChunks(scripted_bundle())
    card = _card(config.model_name or "scripted", scheduler, len(VOCABULARY), chunks)

    def core(deliver: Callable[[StepResult], None]) -> EngineCore:
        return EngineCore(Scheduler(scheduler), ScriptedRunner(script), inbox, deliver)

    return Assembly(card, chunks, inbox, core, None)


def _model(config: EngineConfig, progress: Progress) -> Assembly:
    # Before torch loads OpenMP: threads that spin at each of hundreds of barriers a token stand still for a scheduler's
    # time slice each whenever another process wants a core (2 cores, load 5: 167 ms a step spinning, 40 ms sleeping).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported here: torch takes seconds, which the scripted engine and a wrong setting need not pay.
    progress(0.0, "loading torch")
    import torch

    from services.engine.cache.pages import KvLayout, KvPages
    from services.engine.cache.states import StateLayout, StatePool
    from services.engine.cache.transfer import page_transfers
    from services.engine.decode_steps import buckets
    from services.engine.model.hybrid_config import HybridConfig
    from services.engine.runner import ModelRunner
    from services.engine.sizing import cap, engine_plan
    from services.engine.weights.loader import load_checkpoint, open_checkpoint, resolve_device, resolve_dtype

    if config.threads:
        torch.set_num_threads(config.threads)
    device = resolve_device(config)
    try:
        cap(config, device)
        checkpoint, name = open_checkpoint(config, progress)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what packing left is free for the plan
        plan = engine_plan(checkpoint, config, device)  # what does not fit comes out before it is loaded
        log.info("memory: %s", "; ".join(f"{line.name} {size(line.bytes)}" for line in plan.lines))
        loaded = load_checkpoint(checkpoint, name, config, progress)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # pieces of loading, too small for what comes
        dtype = resolve_dtype(config, device)
        progress(1.0, f"making {plan.pages} cache pages")
        states = None
        if isinstance(loaded.model_config, HybridConfig):
            layout = StateLayout.of(loaded.model_config, dtype, config.state_dtype)
            states = StatePool(layout, plan.states, device)
        pages = KvPages(KvLayout.of(loaded.model_config, dtype, config.kv_format), plan.pages, device)
        transfers = page_transfers(pages, states)
        running = config.max_running if states is None else min(config.max_running, states.count)
        runner = ModelRunner(loaded.model, pages, transfers, device, states, running)
        if device.type == "cuda" and loaded.model.capturable and config.graph_seconds:
            runner.decodes.capture(buckets(running, plan.context), config.graph_seconds, progress)
        if device.type == "cuda":
            progress(1.0, f"running a step of {plan.chunk} tokens once")
            runner.rehearse(plan.chunk)
            torch.cuda.empty_cache()  # what tuning its kernels took
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CannotLoad(f"{device} has no room for the model and its cache: {_first_line(error)}") from error
    except RuntimeError as error:
        # How torch says that the host has no memory; anything else is a fault of ours and keeps its traceback.
        if "memory" not in str(error):
            raise
        raise CannotLoad(f"{device} has no room for the model and its cache: {_first_line(error)}") from error
    scheduler = SchedulerConfig(
        fingerprint=loaded.fingerprint,
        pages=plan.pages,
        max_model_len=plan.context,
        max_batch_tokens=plan.chunk,
        max_running=config.max_running,
        max_queue=config.max_queue,
        page_bytes=pages.page_bytes,
        state_slots=states.count if states is not None else 0,
        state_bytes=states.state_bytes if states is not None else 0,
        checkpoint_interval=config.checkpoint_interval,
        checkpoint_gap=config.checkpoint_gap,
    )
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    kv = None
    kv_connected = threading.Event()

    def deliver(answer: KvAnswer) -> None:
        inbox.put(answer)
        if isinstance(answer, KvConnected):
            kv_connected.set()

    if config.kv_socket:
        kv = KvClient(config.kv_socket, config.engine_id, loaded.fingerprint, deliver)
        kv.start()
    progress(1.0, "packing the tokenizer")
    chunks = TokenizerChunks(loaded.bundle)
    if kv is not None and not kv_connected.wait(KV_CONNECT_SECONDS):
        log.warning("no kvstore at %s yet: starting without the blocks that it may hold", config.kv_socket)
    card = _card(loaded.name, scheduler, loaded.model_config.vocab_size, chunks)

    def core(deliver: Callable[[StepResult], None]) -> EngineCore:
        return EngineCore(Scheduler(scheduler, kv), runner, inbox, deliver)

    return Assembly(card, chunks, inbox, core, kv)


def _card(name: str, scheduler: SchedulerConfig, vocab_size: int, chunks: TokenizerChunks) -> ModelCard:
    return ModelCard(
        name=name,
        fingerprint=scheduler.fingerprint,
        max_model_len=scheduler.max_model_len,
        block_tokens=BLOCK_TOKENS,
        vocab_size=vocab_size,
        tokenizer_digest=chunks.digest,
        created=int(time.time()),
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
