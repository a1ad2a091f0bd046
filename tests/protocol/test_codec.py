"""Every message of the protocol through its decoder: as it is, from a newer version, and from an older one."""

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import fields

from services.protocol import codec, events, generate, kv
from services.protocol.events import (
    BlockEvents,
    BlockSnapshot,
    CachedRun,
    CacheTree,
    EngineLoad,
    GatewayHeartbeat,
    Heartbeat,
    ModelCard,
    SessionNote,
    SpecialTokens,
    TokenizerBundle,
    TokenizerChunk,
)
from services.protocol.generate import (
    Accepted,
    Cancel,
    GenerateRequest,
    Missed,
    Rejected,
    Resume,
    ResumeReply,
    SamplingParams,
    ThoughtLimit,
    TokenBatch,
    TokenDelta,
    Usage,
)

USAGE = Usage(
    prompt_tokens=100,
    output_tokens=7,
    cached_device=64,
    cached_host=32,
    cached_disk=16,
    computed_tokens=4,
    preemptions=1,
    queue_seconds=0.5,
    restore_seconds=0.25,
    prefill_seconds=1.5,
    decode_seconds=2.5,
    missed=Missed(reason="evicted", position=96, seen=100, since=1.5e9, taker="s2"),
)
SAMPLING = SamplingParams(
    max_tokens=5,
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    logit_bias={7: -100.0, 248_000: 1.5},
    seed=2**63 - 1,
    stop_token_ids=(1, 2),
    thoughts=ThoughtLimit(tokens=9, close=5, closing=(4, 5)),
)
REQUEST = GenerateRequest(
    request_id="r",
    gateway_id="g",
    prompt=b"\x01\0\0\0",
    sampling=SAMPLING,
    generated=b"\x02\0\0\0",
    cache_salt="salt",
    session_id="s",
    hints=(64, 90),
    standing="waiting",
)
DELTA = TokenDelta("r", 3, (4, 5), "stop", USAGE, "no error", 2)
CARD = ModelCard(
    name="m",
    fingerprint="f",
    max_model_len=1024,
    block_tokens=64,
    vocab_size=1000,
    tokenizer_digest="d",
    created=1_700_000_000,
)
LOAD = EngineLoad(running=1, waiting=2, queue_capacity=3, pages_total=4, pages_free=5, pending_prefill_tokens=6)
HEARTBEAT = Heartbeat(
    engine_id="e",
    incarnation="i",
    state="ready",
    card=CARD,
    load=LOAD,
    progress=0.5,
    detail="loading layer 3",
    last_event_id=9,
)
BUNDLE = TokenizerBundle(
    tokenizer_json='{"a": "ü"}',
    chat_template="{{ messages }}",
    special=SpecialTokens(bos_id=1, add_bos=True, stop_ids=(2, 3), tokens={"eos_token": "<|im_end|>"}),
    generation_defaults={"temperature": 0.6},
)
RUN = CachedRun(
    name=b"b" * 32,
    parent=b"a" * 32,
    start=64,
    tokens=128,
    device=64,
    held=64,
    host=128,
    checkpoints=((100, "device"), (192, "host")),
    session_id="s",
    standing="finished",
    shared=True,
    idle_seconds=1.5,
)
TREE = CacheTree(
    engine_id="e",
    runs=(RUN,),
    page_bytes=1,
    state_bytes=2,
    pages_total=3,
    pages_held=4,
    pages_cached=5,
    states_total=6,
    states_held=7,
    states_cached=8,
    left_out=9,
)
ENTRY = kv.Entry(key=b"k", length=4096, cost=0.5, parent=b"p", chance=0.25)
EXTENTS = (kv.Extent(0, 4096), kv.Extent(8192, 100))

MESSAGES: list[tuple[Any, Struct]] = [
    (codec.generate_request, REQUEST),
    (codec.generate_reply, Accepted("r", "e")),
    (codec.generate_reply, Rejected("r", "overloaded", "full", 2.5)),
    (codec.token_batch, TokenBatch("e", (DELTA, TokenDelta("r2", 0, ())))),
    (codec.cancel, Cancel("r")),
    (codec.resume, Resume("r", 7)),
    (codec.resume_reply, ResumeReply(DELTA)),
    (codec.resume_reply, ResumeReply(None)),
    (codec.heartbeat, HEARTBEAT),
    (codec.gateway_heartbeat, GatewayHeartbeat("g")),
    (
        codec.block_events,
        BlockEvents(engine_id="e", incarnation="i", event_id=1, stored=(b"a" * 32,), removed=(b"b" * 32,)),
    ),
    (codec.block_snapshot, BlockSnapshot(engine_id="e", incarnation="i", event_id=1, blocks=(b"a" * 32, b"b" * 32))),
    (codec.session_note, SessionNote(session_id="s", standing="waiting")),
    (codec.cache_tree, TREE),
    (codec.tokenizer_chunk, TokenizerChunk("d", 1, 3, b"\0\xff")),
    (codec.tokenizer_bundle, BUNDLE),
    (codec.kv_call, kv.Hello(call=1, client="engine-0", fingerprint="f")),
    (codec.kv_call, kv.Lookup(call=2, keys=(b"a", b"b"))),
    (codec.kv_call, kv.Lease(call=3, keys=(b"a",), trace="00-1-2-01")),
    (codec.kv_call, kv.Reserve(call=4, entries=(ENTRY,), trace="00-1-2-01")),
    (codec.kv_call, kv.Commit(call=5, keys=(b"a",))),
    (codec.kv_call, kv.Release(call=6, lease=2)),
    (codec.kv_call, kv.Drop(call=7, keys=(b"a",))),
    (codec.kv_call, kv.Weigh(call=9, keys=(b"a",), chance=0.5)),
    (codec.kv_call, kv.Stat(call=8)),
    (codec.kv_reply, kv.Welcome(call=1, arena_bytes=2**40, version=1)),
    (codec.kv_reply, kv.States(call=2, states=("miss", "hit", "pending"))),
    (codec.kv_reply, kv.Leased(call=3, lease=1, extents=(EXTENTS, ()), from_disk=(1,))),
    (codec.kv_reply, kv.Reserved(call=4, extents=(EXTENTS, None), full=1)),
    (codec.kv_reply, kv.Done(call=5, count=1)),
    (
        codec.kv_reply,
        kv.StatReply(
            call=8,
            arena_bytes=1,
            used_bytes=2,
            objects=3,
            reserved=4,
            leased=5,
            hits=6,
            misses=7,
            evictions=8,
            clients=("engine-0",),
            disk_bytes=9,
            disk_used_bytes=10,
            disk_objects=11,
            spilled=12,
            reloaded=13,
            torn=14,
        ),
    ),
    (codec.kv_reply, kv.Fault(call=9, message="what?")),
]
EACH = pytest.mark.parametrize(("decoder", "message"), MESSAGES, ids=lambda value: type(value).__name__)


def parts(value: object) -> Iterator[Struct]:
    """All structs in a message."""
    if isinstance(value, Struct):
        yield value
        for field in fields(value):
            yield from parts(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from parts(item)


def wire(value: Any, *, added: bool = False, sparse: bool = False) -> Any:
    """A message as plain msgpack values: `added`, with a field more in every struct (a newer version wrote it);
    `sparse`, without the fields that have defaults (an older version, which did not know them)."""
    if isinstance(value, tuple):
        return [wire(item, added=added, sparse=sparse) for item in value]
    if not isinstance(value, Struct):
        return value
    kept = [field for field in fields(value) if field.required or not sparse]
    items = {field.encode_name: wire(getattr(value, field.name), added=added, sparse=sparse) for field in kept}
    if added:
        items["added_later"] = {"any": ["thing", 1]}
    config = value.__struct_config__
    if config.array_like:
        return list(items.values())
    return ({config.tag_field: config.tag} if config.tag is not None else {}) | items


def sparse(value: Any) -> Any:
    """The message with every field that has a default at its default."""
    if isinstance(value, tuple):
        return tuple(map(sparse, value))
    if not isinstance(value, Struct):
        return value
    return type(value)(**{f.name: sparse(getattr(value, f.name)) for f in fields(value) if f.required})


@EACH
def test_a_message_survives(decoder: Any, message: Struct) -> None:
    assert decoder.decode(codec.encode(message)) == message


@EACH
def test_a_message_of_a_newer_version_is_read(decoder: Any, message: Struct) -> None:
    assert decoder.decode(codec.encode(wire(message))) == message, "the test's own encoding is wrong"
    assert decoder.decode(codec.encode(wire(message, added=True))) == message


@EACH
def test_a_message_of_an_older_version_is_read(decoder: Any, message: Struct) -> None:
    assert decoder.decode(codec.encode(wire(message, sparse=True))) == sparse(message)


@EACH
def test_a_broken_message_is_an_error_and_nothing_else(decoder: Any, message: Struct) -> None:
    data = codec.encode(message)
    for broken in (b"", data[:-1], data + b"\0", codec.encode(17), codec.encode({}), codec.encode([])):
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(broken)


@pytest.mark.parametrize("module", [generate, events, kv], ids=lambda module: module.__name__)
def test_no_struct_is_left_out(module: ModuleType) -> None:
    tested = {type(part) for _, message in MESSAGES for part in parts(message)}
    defined = {
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Struct) and kind.__module__ == module.__name__
    }
    assert defined <= tested


@EACH
def test_the_samples_leave_no_field_at_its_default(decoder: Any, message: Struct) -> None:
    """Else a field that is lost on the way would not be noticed. (Each type must be full in some sample.)"""
    for part in parts(message):
        full = [other for _, m in MESSAGES for other in parts(m) if type(other) is type(part)]
        for field in fields(part):
            if not field.required and not isinstance(part, kv.Welcome):
                assert any(getattr(other, field.name) != field.default for other in full), (type(part), field.name)


def test_a_long_prompt_is_sent_packed() -> None:
    ids = list(range(262_144))
    request = msgspec.structs.replace(REQUEST, prompt=generate.pack_ids(ids))
    data = codec.encode(request)
    assert len(data) < 4 * len(ids) + 1000
    assert generate.unpack_ids(codec.generate_request.decode(data).prompt) == ids


def test_cached_tokens_are_those_of_all_tiers() -> None:
    assert USAGE.cached_tokens == 96


def test_a_state_key_names_its_prefix_and_position() -> None:
    keys = {kv.state_key(prefix, position) for prefix in (b"a" * 32, b"b" * 32) for position in (0, 1, 256, 2**40)}
    assert len(keys) == 8
    assert all(len(key) > 32 for key in keys), "never the key of a block"
