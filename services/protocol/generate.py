"""Requests for tokens and the streams that answer them (gateway <-> engine, over NATS).

Every struct is append-only: a new field needs a default, so that gateway and engine of neighbouring versions understand
each other. Token ids travel packed (`pack_ids`), since a prompt of 262,144 ids as msgpack integers is 25% larger and
much slower to decode.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "cancel", "error"]
"""`stop`: a stop token (the gateway turns stop strings into a Cancel). `length`: max_tokens or the context is full."""

RejectReason = Literal["overloaded", "context_length", "loading", "draining", "bad_request"]


Standing = Literal["live", "waiting", "idle", "finished", "one_off"]
"""What is to be expected of a session between its requests. `live`: a request of it runs. `waiting`: its last answer
called a tool, whose result is on its way. `idle`: a person may go on, or not. `finished`: a sub-agent has answered.
`one_off`: a side request (a title, a summary), whose prompt hardly comes again."""

MissReason = Literal["new", "evicted", "no_checkpoint", "store_full", "store_lost", "store_away"]
"""Why an engine had to compute what is behind the prefix that it found.

* `new`: it has not seen these tokens behind this prefix, as far as it remembers;
* `no_checkpoint`: it has blocks of them, and no recurrent state was kept there to go on from;
* `evicted`: it had them on the device, gave them up, and no kvstore was there to keep them;
* `store_full`: the same, and the kvstore had no room for them;
* `store_lost`: the kvstore had them and has not any more (it evicted them, or was started anew);
* `store_away`: the kvstore has them, perhaps, and cannot be asked just now.
"""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`. Raises ValueError when the length is no multiple of 4."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


class ThoughtLimit(Struct, frozen=True, kw_only=True):
    """Where the engine ends the thoughts that a prompt has opened, if the model has not ended them itself."""

    tokens: int
    """Output tokens, those of `GenerateRequest.generated` included; 1 or more."""
    close: int
    """The token that ends thoughts."""
    closing: tuple[int, ...]
    """What is put behind them as if the model had said it, `close` among it. It counts as output."""


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How the next token is drawn. Order: penalties and bias on the logits, temperature, top_k, top_p, min_p, draw.

    The draw at absolute position p is a pure function of (processed distribution, seed, p), so that a request gives
    the same tokens alone, in a batch, after preemption and on another engine.
    """

    max_tokens: int
    """Generated tokens at most, those of `GenerateRequest.generated` included."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output (Keskar et al. 2019: positive logits divided, negative ones multiplied)."""
    presence_penalty: float = 0.0
    """Over the output only, as OpenAI defines it."""
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    """The gateway always sets one (drawn, when the client gave none), so that a resumed stream goes on alike."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the answer with `stop`; the stop token itself is sent as the last token."""
    thoughts: ThoughtLimit | None = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    request_id: str
    gateway_id: str
    prompt: bytes
    """Packed ids."""
    sampling: SamplingParams
    generated: bytes = b""
    """Packed ids that an engine already produced for this request: the stream resumes behind them, at
    offset len(generated). They count as output (penalties, max_tokens), not as prompt."""
    cache_salt: str = ""
    """Enters the block hashes: contexts of different salts share nothing."""
    session_id: str = ""
    """A hint for the cache policy; answers never depend on it."""
    hints: tuple[int, ...] = ()
    """Prompt lengths at which a later prompt may part from this one, ascending: behind tools and system text, before
    and behind each message, before the generation suffix. A recurrent model's state is worth keeping there, and worth
    looking for."""
    standing: Standing = "idle"
    """What its session will be when the answer is over, unless a `SessionNote` says otherwise."""


class Accepted(Struct, frozen=True, tag="accepted"):
    request_id: str
    engine_id: str


class Rejected(Struct, frozen=True, tag="rejected"):
    request_id: str
    reason: RejectReason
    message: str
    retry_after: float = 1.0
    """Seconds."""


GenerateReply = Accepted | Rejected


class Missed(Struct, frozen=True, kw_only=True):
    """Why the part of a prompt that was computed was not found. What follows from the text, such as that a client
    changed a message, the gateway knows."""

    reason: MissReason
    position: int
    """Tokens that were found: what is behind them was computed."""
    seen: int = 0
    """Where the reason is another than `new`: up to here the engine had it once."""
    since: float = 0.0
    """Unix seconds when it was given up; 0 where that is not known."""
    taker: str = ""
    """The session (or else the request) whose need of room it was given up for; empty where that is not known."""


class Usage(Struct, frozen=True, kw_only=True):
    """What one request cost. Token counts; `cached_*` are prompt tokens that were not computed again, by tier."""

    prompt_tokens: int
    output_tokens: int
    cached_device: int = 0
    cached_host: int = 0
    """Out of the kvstore's memory or its disk."""
    cached_disk: int = 0
    """Those of `cached_host` that the kvstore had on disk only."""
    computed_tokens: int = 0
    """Prompt tokens run through the model, those repeated after a preemption included."""
    preemptions: int = 0
    queue_seconds: float = 0.0
    """From arrival at the engine to the first scheduled step, restore included."""
    restore_seconds: float = 0.0
    prefill_seconds: float = 0.0
    """From the first scheduled step to the first token."""
    decode_seconds: float = 0.0
    missed: Missed | None = None
    """None: nothing but the last token was computed, or not for the first time."""

    @property
    def cached_tokens(self) -> int:
        return self.cached_device + self.cached_host


class TokenDelta(Struct, frozen=True, array_like=True):
    """Tokens [offset, offset + len(tokens)) of one request's output, counted from the first generated token.

    Order, duplicates and gaps are read from `offset`. The last delta of a request, and only it, has `finish` and
    `usage`; it may carry no tokens.
    """

    request_id: str
    offset: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str = ""
    cached: int | None = None
    """Prompt tokens that were found in a cache, as `Usage` will count them: with an engine's first tokens, so that a
    client can be told before it reads any."""


class TokenBatch(Struct, frozen=True, array_like=True):
    """All deltas of one engine step for one gateway."""

    engine_id: str
    deltas: tuple[TokenDelta, ...]


class Cancel(Struct, frozen=True):
    """Stop a request, in whatever state. Idempotent; a known request is always answered by its final delta."""

    request_id: str


class Resume(Struct, frozen=True):
    """Ask again for all tokens of a request from `offset` on (a gap). Answered with ResumeReply."""

    request_id: str
    offset: int


class ResumeReply(Struct, frozen=True):
    delta: TokenDelta | None
    """None: the engine does not know the request (any more)."""
