"""What engines and gateways announce to whoever listens (NATS publish; a lost message is repaired by a later one)."""

from typing import Literal

from msgspec import Struct


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


HEARTBEAT_SECONDS = 0.5
ENGINE_LOST_SECONDS = 3.0
"""An engine not heard for this long is taken for dead; its streams resume elsewhere."""
GATEWAY_LOST_SECONDS = 10.0
