"""msgpack encoders and decoders, made once (building a msgspec decoder costs more than using it)."""

from typing import TypeVar

import msgspec

from services.protocol import events, generate, kv

encode = msgspec.msgpack.Encoder().encode

T = TypeVar("T")


def _decoder(kind: type[T]) -> "msgspec.msgpack.Decoder[T]":
    return msgspec.msgpack.Decoder(kind)


generate_request = _decoder(generate.GenerateRequest)
generate_reply = msgspec.msgpack.Decoder(generate.GenerateReply)
token_batch = _decoder(generate.TokenBatch)
cancel = _decoder(generate.Cancel)
resume = _decoder(generate.Resume)
resume_reply = _decoder(generate.ResumeReply)
heartbeat = _decoder(events.Heartbeat)
gateway_heartbeat = _decoder(events.GatewayHeartbeat)
block_events = _decoder(events.BlockEvents)
block_snapshot = _decoder(events.BlockSnapshot)
session_note = _decoder(events.SessionNote)
cache_tree = _decoder(events.CacheTree)
tokenizer_chunk = _decoder(events.TokenizerChunk)
tokenizer_bundle = _decoder(events.TokenizerBundle)
kv_call = msgspec.msgpack.Decoder(kv.Call)
kv_reply = msgspec.msgpack.Decoder(kv.Reply)
