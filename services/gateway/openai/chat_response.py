"""What /v1/chat/completions answers with, as bytes: events of a stream, or one object."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.errors import ApiError
from services.gateway.openai.usage import WholeUsage, whole_usage
from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning
from services.gateway.renderer import Cost, Ending
from services.protocol.generate import FinishReason

DONE = b"data: [DONE]\n\n"

ChatFinish = FinishReason | Literal["tool_calls"]

_json = msgspec.json.Encoder().encode


class AnswerFunction(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class AnswerCall(Struct, frozen=True, kw_only=True):
    """In a stream `index` is set; `id`, `type` and the name only where a call begins."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: AnswerFunction


class AnswerMessage(Struct, frozen=True, kw_only=True):
    """Thoughts go by both names that clients read, or by none."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: tuple[AnswerCall, ...] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: ChatFinish


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: WholeUsage


class ChatResponse:
    """A Renderer. What stays the same in each event is encoded once; per event only the text is."""

    opening = b""

    def __init__(self, request_id: str, model: str, created: int, include_usage: bool) -> None:
        """`created` in Unix seconds; `include_usage`: a stream ends with an event that carries the usage."""
        self.waits_for_usage = include_usage
        self._id = f"chatcmpl-{request_id}"
        self._model = model
        self._created = created
        self._head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            _json(self._id),
            created,
            _json(model),
        )
        self._delta = self._head + b'{"index":0,"delta":'

    def lead(self, cached: int | None) -> bytes:
        """The event that says who speaks."""
        return self._head + b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'

    def keepalive(self) -> bytes:
        """Without content: every client that reads events resets its timer at it, while comments are no events."""
        return self._head + b"]}\n\n"

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

    def finish(self, ending: Ending) -> bytes:
        return b'%b{"index":0,"delta":{},"finish_reason":%b}]}\n\n' % (self._head, _json(chat_finish(ending)))

    def closing(self, cost: Cost | None) -> bytes:
        """The usage, where it was asked for, comes behind the finish."""
        if cost is None:
            return DONE
        return b'%b],"usage":%b}\n\n' % (self._head, _json(whole_usage(cost))) + DONE

    def error(self, error: ApiError) -> bytes:
        """Nothing follows it."""
        return b"data: %b\n\n" % error.body()

    def failure(self, error: ApiError) -> tuple[int, bytes]:
        return error.status, error.body()

    def whole(self, pieces: Sequence[Piece], ending: Ending, cost: Cost) -> bytes:
        thoughts = "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)]) or UNSET
        message = AnswerMessage(
            content="".join([piece.text for piece in pieces if isinstance(piece, Content)]),
            reasoning_content=thoughts,
            reasoning=thoughts,
            tool_calls=_whole_calls(piece for piece in pieces if isinstance(piece, CallDelta)) or UNSET,
        )
        return _json(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=(ChatChoice(message=message, finish_reason=chat_finish(ending)),),
                usage=whole_usage(cost),
            )
        )


def chat_finish(ending: Ending) -> ChatFinish:
    """Why the answer ended, as a client is told: an answer that the model ended with calls waits for their results."""
    return "tool_calls" if ending.reason == "stop" and ending.calls else ending.reason


def _streamed(delta: CallDelta) -> AnswerCall:
    if not delta.id:
        return AnswerCall(index=delta.index, function=AnswerFunction(delta.arguments))
    return AnswerCall(
        index=delta.index, id=delta.id, type="function", function=AnswerFunction(delta.arguments, delta.name)
    )


def _whole_calls(deltas: Iterable[CallDelta]) -> tuple[AnswerCall, ...]:
    first: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        first.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(
        AnswerCall(id=call.id, type="function", function=AnswerFunction("".join(arguments[index]), call.name))
        for index, call in first.items()
    )
