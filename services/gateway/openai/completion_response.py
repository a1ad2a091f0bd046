"""What /v1/completions answers with, as bytes: events of a stream, or one object."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.errors import ApiError
from services.gateway.openai.usage import WholeUsage, whole_usage
from services.gateway.output.pieces import Content, Piece
from services.gateway.renderer import Cost, Ending
from services.protocol.generate import FinishReason

_json = msgspec.json.Encoder().encode


class TextChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None


class TextCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    usage: WholeUsage | UnsetType = UNSET


class CompletionResponse:
    """A Renderer. A raw prompt's answer is content and nothing else."""

    opening = b""

    def __init__(self, request_id: str, model: str, created: int, include_usage: bool) -> None:
        """`created` in Unix seconds; `include_usage`: a stream ends with an event that carries the usage."""
        self.waits_for_usage = include_usage
        self._id = f"cmpl-{request_id}"
        self._model = model
        self._created = created

    def lead(self, cached: int | None) -> bytes:
        return b""

    def keepalive(self) -> bytes:
        return self._event()

    def pieces(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join([self._event(TextChoice(text=piece.text)) for piece in pieces if isinstance(piece, Content)])

    def finish(self, ending: Ending) -> bytes:
        return self._event(TextChoice(text="", finish_reason=ending.reason))

    def closing(self, cost: Cost | None) -> bytes:
        usage = b"" if cost is None else self._event(usage=whole_usage(cost))
        return usage + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        """Nothing follows it."""
        return b"data: %b\n\n" % error.body()

    def failure(self, error: ApiError) -> tuple[int, bytes]:
        return error.status, error.body()

    def whole(self, pieces: Sequence[Piece], ending: Ending, cost: Cost) -> bytes:
        text = "".join([piece.text for piece in pieces if isinstance(piece, Content)])
        return _json(self._completion(TextChoice(text=text, finish_reason=ending.reason), usage=whole_usage(cost)))

    def _event(self, *choices: TextChoice, usage: WholeUsage | UnsetType = UNSET) -> bytes:
        return b"data: %b\n\n" % _json(self._completion(*choices, usage=usage))

    def _completion(self, *choices: TextChoice, usage: WholeUsage | UnsetType) -> TextCompletion:
        return TextCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
