"""What /v1/chat/completions answers with, as bytes: events of a stream, or one object."""

from typing import Literal

import msgspec
from msgspec import Struct

from services.gateway.errors import ApiError
from services.protocol.generate import FinishReason, Usage

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


class _PromptDetails(Struct, frozen=True):
    cached_tokens: int


class _OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


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
    completion_tokens_details: _OutputDetails = _OutputDetails()
    samovar: _Samovar


class _Message(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str


class _Choice(Struct, frozen=True, kw_only=True):
    index: int = 0
    message: _Message
    logprobs: None = None
    finish_reason: FinishReason


class _Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: _Usage


def _usage(usage: Usage) -> _Usage:
    return _Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        prompt_tokens_details=_PromptDetails(usage.cached_tokens),
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
        self._content = self._head + b'{"index":0,"delta":{"content":'
        self.role = self._head + b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
        """The first event."""
        self.keepalive = self._head + b"]}\n\n"
        """Without content: every client that reads events resets its timer at it, while comments are no events."""

    def content(self, text: str) -> bytes:
        return b"".join((self._content, _json(text), b'},"finish_reason":null}]}\n\n'))

    def finish(self, reason: FinishReason) -> bytes:
        return b'%b{"index":0,"delta":{},"finish_reason":%b}]}\n\n' % (self._head, _json(reason))

    def usage(self, usage: Usage) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._head, _json(_usage(usage)))

    @staticmethod
    def error(error: ApiError) -> bytes:
        """The last event of a stream that fails half-way; nothing follows it."""
        return b"data: %b\n\n" % error.body()

    def whole(self, text: str, finish: FinishReason, usage: Usage) -> bytes:
        """The answer that is not streamed."""
        return _json(
            _Completion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=(_Choice(message=_Message(content=text), finish_reason=finish),),
                usage=_usage(usage),
            )
        )
