"""How large the contexts, the pools and the judges' questions are, on what they run.

The tool's agent-sim and abort-sim take 4 characters for a token whatever the tokenizer; here a token is a token of the
small model, which all scales use. So their arguments are smaller by `ARGUMENT`, unless a scale says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from services.protocol.hashing import BLOCK_TOKENS

SMALL_MODEL = Path(__file__).resolve().parents[2] / "models" / "samovar-tiny"
STOP_IDS = (4087, 4089)
"""Of the small model's tokenizer."""
TOKENS_PER_CHAR = 0.3648
"""Of the judges' texts under it."""
ARGUMENT = 0.25 / TOKENS_PER_CHAR
"""That a judge must be told for a token."""

REPROMPT = 117
"""Tokens that abort-sim's second request may compute: 0.2% of the 58,500 that its 40,000 are under this tokenizer. What
it must compute is 95 and does not shrink with the context: the end of the thought, the new question, the template."""


@dataclass(frozen=True, slots=True)
class Pool:
    pages: int
    """Of 64 tokens, on the device."""
    states: int
    """Slots for recurrent states on the device."""


@dataclass(frozen=True, slots=True)
class Agents:
    """All in tokens, but `steps`."""

    step: int
    sub: int
    finalize: int
    reply: int
    steps: int = 30
    sessions: int = 4


@dataclass(frozen=True, slots=True)
class Restore:
    name: str
    tokens: int
    contexts: int
    limit: float | None = None
    """Milliseconds from the request to its first step."""


@dataclass(frozen=True, slots=True)
class Scale:
    topic: str
    """The file in docs/benchmarks; empty: none is written."""
    model: Literal["small", "27b"]
    device: Literal["cpu", "cuda"]
    settings: Mapping[str, str]
    """SAMOVAR_* beside those of a pool."""
    pool: Pool
    small_pool: Pool
    """Of `agent-200k`, where everything has to move."""
    kv_size: int
    """cache-pressure's, in tokens: it asks for so much and five contexts more."""
    context: int
    """Tokens of each of cache-pressure's contexts."""
    agents: Agents
    abort_argument: int
    """abort-sim's --context-tokens."""
    abort_after: int
    """Pieces of text that it reads."""
    abort_budget: int
    """Its --max-tokens."""
    least_reuse: float | None
    """Of abort-sim; None: REPROMPT tokens, whatever the context."""
    chunk: int
    """Tokens of a step of prefill at most."""
    left: int
    """Tokens of the prompt that is left in the middle of its prefill."""
    restarted: int
    """Contexts in the host tier when the engine is killed."""
    restarted_tokens: int
    restores: tuple[Restore, ...]
    needles: tuple[int, ...]
    """Tokens; none with a model that knows nothing."""
    needle_salts: int
    perf_context: int
    perf_step: int
    perf_output: int
    timed: bool
    """Whether times are judged: on two cores that others use too they are noise."""
    patience: float
    """Seconds that a judge may take."""
    start: float
    """Seconds that the stack may take until it is ready."""


def _pages(tokens: int) -> int:
    return tokens // BLOCK_TOKENS


CPU = Scale(
    topic="cache-cpu",
    model="small",
    device="cpu",
    settings={
        "SAMOVAR_MAX_RUNNING": "6",
        "SAMOVAR_MAX_BATCH_TOKENS": "256",
        "SAMOVAR_KV_ARENA": "2GiB",
        "SAMOVAR_GRAPH_SECONDS": "0",
    },
    # 65 contexts of 512 tokens, of which a quarter has room; all else is smaller by the same 55 as 460K tokens are.
    pool=Pool(130, 24),
    small_pool=Pool(56, 12),
    kv_size=30720,
    context=512,
    agents=Agents(step=90, sub=723, finalize=36, reply=4),
    abort_argument=700,
    abort_after=12,
    abort_budget=512,
    least_reuse=None,
    chunk=256,
    left=3000,
    restarted=10,
    restarted_tokens=512,
    restores=(Restore("512", 512, 8), Restore("2K", 2048, 2)),
    needles=(2000,),
    needle_salts=3,
    perf_context=4096,
    perf_step=640,
    perf_output=16,
    timed=False,
    patience=120,
    start=120,
)
"""What CI asks for."""

_GPU = {
    "SAMOVAR_MAX_RUNNING": "8",
    "SAMOVAR_MAX_BATCH_TOKENS": "8192",
    "SAMOVAR_KV_ARENA": "64GiB",
    "SAMOVAR_KV_FORMAT": "fp8",
    "SAMOVAR_GRAPH_SECONDS": "30",
    "SAMOVAR_START_TIMEOUT": "300",
}

H200 = Scale(
    topic="cache-h200",
    model="27b",
    device="cuda",
    settings=_GPU,
    pool=Pool(_pages(460_000), 128),
    small_pool=Pool(_pages(200_000), 64),
    kv_size=480_000,
    context=8000,
    agents=Agents(step=5000, sub=40_000, finalize=2000, reply=64),
    abort_argument=40_000,
    abort_after=500,
    abort_budget=32_768,
    least_reuse=0.998,
    chunk=8192,
    left=100_000,
    restarted=10,
    restarted_tokens=32_768,
    restores=(Restore("8K", 8192, 12, 15.0), Restore("100K", 102_400, 3, 100.0)),
    needles=(),
    needle_salts=0,
    perf_context=40_000,
    perf_step=10_000,
    perf_output=128,
    timed=True,
    patience=400,
    start=400,
)

H200_SMALL = replace(
    H200,
    topic="cache-h200-small-model",
    model="small",
    settings={**_GPU, "SAMOVAR_KV_FORMAT": "auto", "SAMOVAR_KV_ARENA": "16GiB"},
    abort_after=16,
    abort_budget=512,
    restores=(Restore("8K", 8192, 12), Restore("100K", 102_400, 3)),
    needles=(2000, 8000, 32_000, 64_000, 128_000),
    needle_salts=2,
)
"""The same sizes, with a model whose answers can be wrong."""

SCALES = {"cpu": CPU, "h200": H200, "h200-small-model": H200_SMALL}
