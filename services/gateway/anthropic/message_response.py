"""What /v1/messages answers with, as bytes: events of a stream, or one message."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.anthropic import errors
from services.gateway.errors import ApiError
from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning
from services.gateway.renderer import Cost, Ending
from services.gateway.usage import SamovarUsage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_json = msgspec.json.Encoder().encode


class MessageUsage(Struct, frozen=True, kw_only=True):
    """The three kinds of input tokens together are the whole prompt."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    samovar: SamovarUsage | UnsetType = UNSET
    """Not at the start of a stream, when only the cached tokens are known."""


class MessageAnswer(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[dict[str, Any]] = ()
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageResponse:
    """A Renderer. A stream keeps one content block open at a time.

    `message_start` carries how much of the prompt was cached, and some clients read it nowhere else: so it waits for
    the first token, and pings go out before it. (SDKs drop pings, whatever their place.)
    """

    opening = PING
    waits_for_usage = True

    def __init__(self, request_id: str, model: str, prompt_tokens: int) -> None:
        self._id = f"msg_{request_id}"
        self._model = model
        self._prompt_tokens = prompt_tokens
        # Clients send thoughts back only with one; nothing here depends on it.
        self._signature = request_id
        self._index = -1
        """Of the newest block."""
        self._open: type[Reasoning] | type[Content] | type[CallDelta] | None = None
        self._stop: tuple[StopReason, str | None] = ("end_turn", None)

    def lead(self, cached: int | None) -> bytes:
        read = cached or 0
        usage = MessageUsage(input_tokens=self._prompt_tokens - read, cache_read_input_tokens=read, output_tokens=0)
        return _event("message_start", {"message": MessageAnswer(id=self._id, model=self._model, usage=usage)})

    def keepalive(self) -> bytes:
        return PING

    def pieces(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join([event for piece in pieces for event in self._piece(piece)])

    def _piece(self, piece: Piece) -> list[bytes]:
        match piece:
            case Reasoning(text):
                head = self._begin(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                return [*head, self._delta({"type": "thinking_delta", "thinking": text})]
            case Content(text):
                head = self._begin(Content, {"type": "text", "text": ""})
                return [*head, self._delta({"type": "text_delta", "text": text})]
            case CallDelta():
                head = []
                if piece.id:
                    block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                    head = self._begin(CallDelta, block)
                if not piece.arguments:
                    return head
                return [*head, self._delta({"type": "input_json_delta", "partial_json": piece.arguments})]

    def _begin(self, kind: type[Reasoning] | type[Content] | type[CallDelta], block: dict[str, Any]) -> list[bytes]:
        """Nothing where a block of this kind is open; each call is a block of its own."""
        if self._open is kind and kind is not CallDelta:
            return []
        ended = self._end()
        self._index += 1
        self._open = kind
        return [ended, _event("content_block_start", {"index": self._index, "content_block": block})]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open is Reasoning:
            signature = self._delta({"type": "signature_delta", "signature": self._signature})
        self._open = None
        return signature + _event("content_block_stop", {"index": self._index})

    def finish(self, ending: Ending) -> bytes:
        self._stop = _stop(ending)
        return self._end()

    def closing(self, cost: Cost | None) -> bytes:
        assert cost is not None
        reason, sequence = self._stop
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", {"delta": delta, "usage": _usage(cost)}) + _event("message_stop", {})

    def error(self, error: ApiError) -> bytes:
        """Nothing follows it."""
        return b"event: error\ndata: %b\n\n" % errors.body(error)

    def failure(self, error: ApiError) -> tuple[int, bytes]:
        return errors.status(error), errors.body(error)

    def whole(self, pieces: Sequence[Piece], ending: Ending, cost: Cost) -> bytes:
        reason, sequence = _stop(ending)
        return _json(
            MessageAnswer(
                id=self._id,
                model=self._model,
                content=self._blocks(pieces),
                stop_reason=reason,
                stop_sequence=sequence,
                usage=_usage(cost),
            )
        )

    def _blocks(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        arguments: dict[int, list[str]] = {}
        """By the index of the call."""
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            last = blocks[-1] if blocks else {"type": ""}
            match piece:
                case Reasoning(text) if last["type"] == "thinking":
                    last["thinking"] += text
                case Reasoning(text):
                    blocks.append({"type": "thinking", "thinking": text, "signature": self._signature})
                case Content(text) if last["type"] == "text":
                    last["text"] += text
                case Content(text):
                    blocks.append({"type": "text", "text": text})
                case CallDelta():
                    if piece.id:
                        calls[piece.index] = {"type": "tool_use", "id": piece.id, "name": piece.name}
                        blocks.append(calls[piece.index])
                    arguments.setdefault(piece.index, []).append(piece.arguments)
        for index, call in calls.items():
            call["input"] = msgspec.Raw("".join(arguments[index]).encode())
        return blocks


def _stop(ending: Ending) -> tuple[StopReason, str | None]:
    """Why the answer ended: calls before a stop sequence, since they wait for their results."""
    if ending.reason == "length":
        return "max_tokens", None
    if ending.calls:
        return "tool_use", None
    if ending.stop_string is not None:
        return "stop_sequence", ending.stop_string
    return "end_turn", None


def _usage(cost: Cost) -> MessageUsage:
    usage = cost.usage
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        samovar=SamovarUsage.of(cost),
    )


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json({"type": name, **fields}))
