"""What /v1/chat/completions answers with, as bytes: events of a stream, or one object."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.errors import ApiError
from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning
from services.protocol.generate import FinishReason, Usage

DONE = b"data: [DONE]\n\n"

ChatFinish = FinishReason | Literal["tool_calls"]

_json = msgspec.json.Encoder().encode


class _PromptDetails(Struct, frozen=True):
    cached_tokens: int


class _OutputDetails(Struct, frozen=True):
    reasoning_tokens: int


class _Samovar(Struct, frozen=True, kw_only=True):
    """What OpenAI's fields have no place for. Seconds and tokens as in `protocol.generate.Usage`."""

    cached_device: int
    cached_host: int
    computed_tokens: int
    preemptions: int
    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    decode_seconds: float


class _Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    """The whole prompt, cached tokens included."""
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails
    completion_tokens_details: _OutputDetails
    samovar: _Samovar


class _Function(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class _Call(Struct, frozen=True, kw_only=True):
    """In a stream `index` is set; `id`, `type` and the name only where a call begins."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: _Function


class _Message(Struct, frozen=True, kw_only=True):
    """Thoughts go by both names that clients read, or by none."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: tuple[_Call, ...] | UnsetType = UNSET


class _Choice(Struct, frozen=True, kw_only=True):
    index: int = 0
    message: _Message
    logprobs: None = None
    finish_reason: ChatFinish


class _Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: _Usage


def _usage(usage: Usage, reasoning_tokens: int) -> _Usage:
    return _Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        prompt_tokens_details=_PromptDetails(usage.cached_tokens),
        completion_tokens_details=_OutputDetails(reasoning_tokens),
        samovar=_Samovar(
            cached_device=usage.cached_device,
            cached_host=usage.cached_host,
            computed_tokens=usage.computed_tokens,
            preemptions=usage.preemptions,
            queue_seconds=round(usage.queue_seconds, 6),
            restore_seconds=round(usage.restore_seconds, 6),
            prefill_seconds=round(usage.prefill_seconds, 6),
            decode_seconds=round(usage.decode_seconds, 6),
        ),
    )


class ChatResponse:
    """One request's answer. What stays the same in each event is encoded once; per event only the text is."""

    def __init__(self, request_id: str, model: str, created: int, include_usage: bool) -> None:
        """`created` in Unix seconds; `include_usage`: a stream ends with an event that carries the usage."""
        self.include_usage = include_usage
        self._id = f"chatcmpl-{request_id}"
        self._model = model
        self._created = created
        self._head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            _json(self._id),
            created,
            _json(model),
        )
        self._delta = self._head + b'{"index":0,"delta":'
        self.role = self._head + b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
        """The first event."""
        self.keepalive = self._head + b"]}\n\n"
        """Without content: every client that reads events resets its timer at it, while comments are no events."""

    def pieces(self, pieces: Iterable[Piece]) -> bytes:
        """An event for each; nothing for none."""
        return b"".join([self._piece(piece) for piece in pieces])

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                delta = b'{"content":%b}' % _json(text)
            case Reasoning(text):
                encoded = _json(text)
                delta = b'{"reasoning_content":%b,"reasoning":%b}' % (encoded, encoded)
            case CallDelta():
                delta = b'{"tool_calls":[%b]}' % _json(_streamed(piece))
        return b"".join((self._delta, delta, b',"finish_reason":null}]}\n\n'))

    def finish(self, reason: ChatFinish) -> bytes:
        return b'%b{"index":0,"delta":{},"finish_reason":%b}]}\n\n' % (self._head, _json(reason))

    def usage(self, usage: Usage, reasoning_tokens: int) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._head, _json(_usage(usage, reasoning_tokens)))

    @staticmethod
    def error(error: ApiError) -> bytes:
        """The last event of a stream that fails half-way; nothing follows it."""
        return b"data: %b\n\n" % error.body()

    def whole(self, pieces: Sequence[Piece], finish: ChatFinish, usage: Usage, reasoning_tokens: int) -> bytes:
        """The answer that is not streamed."""
        thoughts = "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)]) or UNSET
        message = _Message(
            content="".join([piece.text for piece in pieces if isinstance(piece, Content)]),
            reasoning_content=thoughts,
            reasoning=thoughts,
            tool_calls=_whole_calls(piece for piece in pieces if isinstance(piece, CallDelta)) or UNSET,
        )
        return _json(
            _Completion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=(_Choice(message=message, finish_reason=finish),),
                usage=_usage(usage, reasoning_tokens),
            )
        )


def chat_finish(reason: FinishReason, calls: int) -> ChatFinish:
    """Why the answer ended, as a client is told: an answer that the model ended with calls waits for their results."""
    return "tool_calls" if reason == "stop" and calls else reason


def _streamed(delta: CallDelta) -> _Call:
    if not delta.id:
        return _Call(index=delta.index, function=_Function(delta.arguments))
    return _Call(index=delta.index, id=delta.id, type="function", function=_Function(delta.arguments, delta.name))


def _whole_calls(deltas: Iterable[CallDelta]) -> tuple[_Call, ...]:
    first: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        first.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(
        _Call(id=call.id, type="function", function=_Function("".join(arguments[index]), call.name))
        for index, call in first.items()
    )
