"""An engine without bus, tokenizer and kvstore: model, pages, states, runner, scheduler and step loop, as
`services.engine.assembly` puts them together, driven one step at a time."""

import itertools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bench.engine_verify import verify_seconds
from bench.filled_contexts import FilledContexts
from bench.random_model import RandomModel
from services.engine.batch import Runner
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.cache.transfer import page_transfers
from services.engine.config import KvFormat, StateDtype
from services.engine.core import EngineCore
from services.engine.decode_steps import buckets
from services.engine.mailbox import CancelRequest, StepResult, Submit
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.request import Request
from services.engine.runner import ModelRunner
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.protocol.generate import SamplingParams, TokenDelta
from services.protocol.hashing import BLOCK_TOKENS

WARM_STEPS, STEPS = 12, 64
"""Of a decode: a page's worth, so that every sequence begins a page once."""
REACH = WARM_STEPS + STEPS + 52
"""Tokens behind a context for which there must be pages: two pages, with the steps of a trace."""
_WORK_BYTES = 12 * 2**30
"""Left for a step: a prefill of 8192 tokens of the 27B behind 260K takes less."""
_MOST_STEPS = 4096
"""After which a request that gave nothing is an error."""
_LADDER = 8192
"""Tokens between the checkpoints of a long prefill: the default of SAMOVAR_CHECKPOINT_INTERVAL."""


def pages_for(depth: int, batch: int) -> int:
    """That so many contexts and their decode take."""
    return batch * -(-(depth + REACH) // BLOCK_TOKENS)


def fitting_pages(
    model: HybridDecoder,
    wanted: Sequence[int],
    states: int,
    kv_format: KvFormat,
    state_dtype: StateDtype,
    device: torch.device,
) -> int:
    """The largest number of `wanted` for which a GPU has room beside what is there, so many states and a step's work;
    1 where it has for none. A host has for all."""
    if device.type != "cuda":
        return max(wanted)
    torch.cuda.empty_cache()
    taken = (states + 1) * StateLayout.of(model.config, model.dtype, state_dtype).state_bytes + _WORK_BYTES
    room = torch.cuda.mem_get_info(device)[0] - taken
    most = room // KvLayout.of(model.config, model.dtype, kv_format).page_bytes - 1
    return max((count for count in wanted if count <= most), default=1)


@dataclass(frozen=True, slots=True)
class Decoded:
    """One entry a measured step."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    """Delivered to all requests together."""

    @property
    def rate(self) -> float:
        """Tokens a second, the median of the steps."""
        return median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))

    @property
    def mean_rate(self) -> float:
        """The same over all steps together."""
        return sum(self.tokens) / sum(self.seconds)


class EngineRig:
    def __init__(
        self,
        weights: RandomModel,
        pages: int,
        states: int,
        kv_format: KvFormat,
        state_dtype: StateDtype,
        device: torch.device,
        running: int,
        graph_seconds: float,
    ) -> None:
        """`running`: requests of a case at most; `graph_seconds`: as SAMOVAR_GRAPH_SECONDS, 0 leaves `capture` to the
        caller. Raises SettingsError for a KV format that cannot hold the model's heads, and what torch raises when the
        memory is not there."""
        self.weights = weights
        model = weights.model
        self._states = StatePool(StateLayout.of(model.config, model.dtype, state_dtype), states, device)
        self._pages = KvPages(KvLayout.of(model.config, model.dtype, kv_format), pages, device)
        transfers = page_transfers(self._pages, self._states)
        self._runner = ModelRunner(model, self._pages, transfers, device, self._states, running)
        self._contexts: FilledContexts | None = None
        self._names = itertools.count()
        self.capture(running, min(model.config.context_length, pages * BLOCK_TOKENS), graph_seconds)

    @property
    def pages(self) -> int:
        return self._pages.count

    def capture(self, running: int, context: int, seconds: float) -> int:
        """Graphs for decodes of up to `running` sequences of up to `context` tokens, on a GPU and where `seconds` are
        given. Returns how many."""
        model = self.weights.model
        if model.device.type != "cuda" or not model.capturable or not seconds:
            return 0
        wanted = buckets(running, context)
        self._runner.decodes.capture(wanted, seconds, lambda share, what: None)
        return len(wanted)

    def rehearse(self, chunk: int) -> None:
        """As an engine does before it is ready."""
        self._runner.rehearse(chunk)

    def step_bytes(self, depth: int, batch: int) -> int:
        """That a decode of so many sequences behind `depth` tokens must read and write: the weights once, of each
        sequence its K and V, and its state and convolution columns there and back."""
        states = self._states
        moved = 2 * (states.states[0].nbytes + states.columns[0].nbytes)
        return self.weights.read_bytes + batch * (depth * self._pages.page_bytes // BLOCK_TOKENS + moved)

    def decode(
        self,
        depth: int,
        batch: int,
        temperature: float,
        steps: int = STEPS,
        observe: Callable[[Callable[[], object]], None] | None = None,
    ) -> Decoded:
        """`batch` requests with contexts of `depth` tokens (whole pages) of their own, which are filled and not read.
        Temperature 0 is greedy, else top_p is 0.95. `observe` is called behind the measured steps, with what runs
        another one; REACH limits how often."""
        if self._contexts is None:
            with torch.inference_mode():
                self._contexts = FilledContexts(self._runner, self._pages, self._states)
        loop = _Loop(self._contexts, self._scheduler(depth + REACH, batch, batch * depth, ladder=False))
        requests = [self._request(depth, temperature, seed) for seed in range(batch)]
        for request in requests:
            loop.submit(request)
        names = [request.request_id for request in requests]
        loop.until_started(names)
        for _ in range(WARM_STEPS):
            loop.step()
        measured = [loop.step() for _ in range(steps)]
        if observe is not None:
            observe(loop.step)
        loop.end(names)
        return Decoded(*zip(*measured, strict=True))

    def prefill(self, tokens: int, chunk: int) -> float:
        """Seconds from a request's arrival to its first token, with a prompt that nobody has seen, in chunks of at most
        `chunk` tokens and with the checkpoints that an engine takes on the way."""
        loop = _Loop(self._runner, self._scheduler(tokens + REACH, 1, chunk, ladder=True))
        request = self._request(tokens, 0.0, 0)
        begin = time.perf_counter()
        loop.submit(request)
        loop.until_started([request.request_id])
        seconds = time.perf_counter() - begin
        loop.end([request.request_id])
        return seconds

    def answer(self, tokens: int, batch: int, chunk: int, steps: int) -> tuple[float, Decoded]:
        """`batch` requests at once, each with a prompt of `tokens` that is read as by `prefill`, and then `steps` steps
        that decode. Seconds until all have their first token, and the steps. Greedy."""
        loop = _Loop(self._runner, self._scheduler(tokens + REACH, batch, chunk, ladder=True))
        requests = [self._request(tokens, 0.0, seed) for seed in range(batch)]
        names = [request.request_id for request in requests]
        begin = time.perf_counter()
        for request in requests:
            loop.submit(request)
        loop.until_started(names)
        seconds = time.perf_counter() - begin
        measured = [loop.step() for _ in range(steps)]
        loop.end(names)
        return seconds, Decoded(*zip(*measured, strict=True))

    def verify(self, depth: int, tokens: int) -> float:
        """See `engine_verify.verify_seconds`."""
        return verify_seconds(self.weights.model, self._pages, self._states, depth, tokens, STEPS)

    def close(self) -> None:
        self._runner.close()

    def _scheduler(self, context: int, batch: int, chunk: int, ladder: bool) -> Scheduler:
        """An empty one: what the pages hold belongs to nobody."""
        config = SchedulerConfig(
            fingerprint="random weights",
            pages=self._pages.count,
            max_model_len=context,
            max_batch_tokens=max(2, chunk),
            max_running=batch,
            state_slots=self._states.count,
            checkpoint_interval=_LADDER if ladder else -(-context // BLOCK_TOKENS) * BLOCK_TOKENS,
        )
        return Scheduler(config)

    def _request(self, tokens: int, temperature: float, seed: int) -> Request:
        """With a random prompt."""
        prompt = torch.randint(0, self.weights.model.config.vocab_size, (tokens,)).tolist()
        sampling = SamplingParams(max_tokens=REACH, temperature=temperature, top_p=0.95, seed=seed)
        return Request(f"bench-{next(self._names)}", "bench", prompt, [], 0, sampling)


class _Loop:
    """The engine's own step loop, a step a call."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._results: list[StepResult] = []
        self._core = EngineCore(scheduler, runner, queue.SimpleQueue(), self._results.append)

    def submit(self, request: Request) -> None:
        self._core.handle(Submit(request))

    def step(self) -> tuple[float, int]:
        """Seconds, and tokens that came. Raises RuntimeError when a request ended."""
        self._results.clear()
        begin = time.perf_counter()
        self._core.step()
        seconds = time.perf_counter() - begin
        for delta in self._deltas():
            if delta.finish is not None:
                raise RuntimeError(f"{delta.request_id} ended: {delta.finish} {delta.error}")
        return seconds, sum(len(delta.tokens) for delta in self._deltas())

    def until_started(self, names: Sequence[str]) -> None:
        """Until each request has a token. Raises RuntimeError when one ends, or when none comes."""
        waiting = set(names)
        for _ in range(_MOST_STEPS):
            self.step()
            waiting -= {delta.request_id for delta in self._deltas() if delta.tokens}
            if not waiting:
                return
        raise RuntimeError(f"no token in {_MOST_STEPS} steps for {', '.join(sorted(waiting))}")

    def end(self, names: Sequence[str]) -> None:
        for name in names:
            self._core.handle(CancelRequest(name))
        self._core.step()  # which delivers their ends
        if not self._scheduler.idle:
            raise RuntimeError("requests go on although they were cancelled")

    def _deltas(self) -> Iterator[TokenDelta]:
        return (delta for result in self._results for _, delta in result.deltas)
