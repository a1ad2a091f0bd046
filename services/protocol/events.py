"""What engines and gateways announce to whoever listens (NATS publish; a lost message is repaired by a later one)."""

from typing import Literal

from msgspec import Struct

from services.protocol.generate import Standing


class ModelCard(Struct, frozen=True, kw_only=True):
    """All that a gateway must know of an engine's model; it never reads the engine's config."""

    name: str
    """The name that clients send as `model`."""
    fingerprint: str
    """Of weights, KV format and block layout: engines with equal fingerprints share cache blocks."""
    max_model_len: int
    """Prompt + output tokens at most: the model's context, or what the device pool holds if that is less."""
    block_tokens: int
    vocab_size: int
    tokenizer_digest: str
    """Names the `TokenizerBundle` that `subjects.tokenizer` serves in chunks."""
    created: int
    """Unix seconds."""


class SpecialTokens(Struct, frozen=True, kw_only=True):
    bos_id: int | None = None
    add_bos: bool = False
    """Put `bos_id` in front of a prompt that does not start with it (GGUF `add_bos_token`)."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end an assistant turn: eos, `<|im_end|>`, `<|eot_id|>`, ..."""
    tokens: dict[str, str] = {}
    """`bos_token`, `eos_token`, ... as chat templates name them."""


class TokenizerBundle(Struct, frozen=True, kw_only=True):
    """Text side of a model, whatever its file format was. Sent compressed (zlib) and cut into chunks."""

    tokenizer_json: str
    """In the format of the `tokenizers` library."""
    chat_template: str
    """A jinja template, `""` where the model has none (then only raw prompts can be served)."""
    special: SpecialTokens
    generation_defaults: dict[str, float] = {}
    """temperature, top_p, top_k, min_p, repetition_penalty of the model's `generation_config.json`, where given."""


class TokenizerChunk(Struct, frozen=True):
    """Reply to a request on `subjects.tokenizer` whose payload is the chunk's index in decimal."""

    digest: str
    index: int
    count: int
    data: bytes
    """Of the zlib-compressed msgpack encoding of a TokenizerBundle; the digest is blake2b-128 (hex) of the whole."""


class EngineLoad(Struct, frozen=True, kw_only=True):
    running: int = 0
    waiting: int = 0
    queue_capacity: int = 0
    """Requests that may wait at most; at `waiting == queue_capacity` a new one is rejected."""
    pages_total: int = 0
    pages_free: int = 0
    """Not used by a running request (cached pages count as free)."""
    pending_prefill_tokens: int = 0


EngineState = Literal["loading", "ready", "draining", "failed"]


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Published by each engine every `HEARTBEAT_SECONDS` and at once when its state changes."""

    engine_id: str
    incarnation: str
    """New at every start of the process: a change means that everything in flight there is lost."""
    state: EngineState
    card: ModelCard | None = None
    """Set as soon as the model is loaded."""
    load: EngineLoad = EngineLoad()
    progress: float = 0.0
    """While loading, 0 to 1."""
    detail: str = ""
    """What is loaded just now, or why the state is `failed`."""
    last_event_id: int = 0
    """Of the engine's BlockEvents, so that a silent listener notices a gap."""


class GatewayHeartbeat(Struct, frozen=True):
    """Engines cancel the requests of a gateway that was heard once and then not for `GATEWAY_LOST_SECONDS`."""

    gateway_id: str


class SessionNote(Struct, frozen=True, kw_only=True):
    """A gateway knows more of a session now than when it sent its last request. Engines weigh by it what they keep of
    the session; a lost note costs nothing but a worse guess."""

    session_id: str
    standing: Standing


class BlockEvents(Struct, frozen=True, kw_only=True):
    """Blocks that entered or left an engine's device cache. `event_id` counts messages from 1 without gaps."""

    engine_id: str
    incarnation: str
    event_id: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class BlockSnapshot(Struct, frozen=True, kw_only=True):
    """All blocks on an engine's device, as of `event_id` (reply to a request on `subjects.blocks`)."""

    engine_id: str
    incarnation: str
    event_id: int
    blocks: tuple[bytes, ...] = ()


Tier = Literal["device", "host"]


class CachedRun(Struct, frozen=True, kw_only=True):
    """A run of blocks that no other context parts from: one edge of the tree of contexts."""

    name: bytes
    """Of its last block."""
    parent: bytes = b""
    """Name of the run before it; empty where it is a conversation's beginning."""
    start: int
    """Token position at which it begins."""
    tokens: int
    """Full blocks only."""
    device: int
    """Of these tokens, on the device."""
    held: int = 0
    """Of these tokens, in use by running requests."""
    host: int = 0
    """Of these tokens, written through to the kvstore, as far as the engine knows."""
    checkpoints: tuple[tuple[int, Tier], ...] = ()
    """Positions of the recurrent states kept within it (or behind its last block), and where."""
    session_id: str = ""
    """That used it last."""
    standing: Standing = "idle"
    shared: bool = False
    """Several sessions have used it."""
    idle_seconds: float = 0.0
    """Since its last use."""


class CacheTree(Struct, frozen=True, kw_only=True):
    """Reply to a request on `subjects.cache`: what an engine has of which contexts, parents before children."""

    engine_id: str
    runs: tuple[CachedRun, ...]
    page_bytes: int
    """Of one block of `BLOCK_TOKENS` tokens."""
    state_bytes: int
    """Of one checkpoint; 0: the model has no recurrent state."""
    pages_total: int
    pages_held: int
    pages_cached: int
    states_total: int = 0
    states_held: int = 0
    states_cached: int = 0
    left_out: int = 0
    """Runs that did not fit into one message, those used longest ago."""


HEARTBEAT_SECONDS = 0.5
ENGINE_LOST_SECONDS = 3.0
"""An engine not heard for this long is taken for dead; its streams resume elsewhere."""
GATEWAY_LOST_SECONDS = 10.0
