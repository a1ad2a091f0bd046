"""Renders an answer as a response: its events, numbered and in the order that clients rely on, or one object."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from services.gateway.errors import ApiError
from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning
from services.gateway.renderer import Cost, Ending
from services.gateway.responses.open_items import Event, OpenCall, OpenCustomCall, OpenItem, OpenText
from services.gateway.responses.output_items import OutputItem, Status
from services.gateway.responses.response_object import (
    Failure,
    IncompleteDetails,
    ResponseObject,
    ResponseUsage,
)

_json = msgspec.json.Encoder().encode


class ResponsesRenderer:
    """A `renderer.Renderer`. Whole and streamed answers go through the same items, so that they are the same, but for
    a call that the limit cut: a stream has shown it, and ends it as `incomplete`."""

    waits_for_usage = True

    def __init__(
        self, response: ResponseObject, custom: frozenset[str], keep: Callable[[ResponseObject], None] | None
    ) -> None:
        """`custom`: names of custom tools. `keep` is told the response when it is complete or was cut by its limit;
        None stores nothing."""
        self._response = response
        self._suffix = response.id.partition("_")[2]
        self._custom = custom
        self._keep = keep
        self._number = 0
        self._done: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._ending: Ending | None = None
        self.opening = self._lifecycle("created", response) + self.keepalive()
        """Made once, since each event takes its number."""

    def lead(self, cached: int | None) -> bytes:
        return b""

    def keepalive(self) -> bytes:
        return self._lifecycle("in_progress", self._response)

    def pieces(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join([self._event(event) for piece in pieces for event in self._piece(piece)])

    def finish(self, ending: Ending) -> bytes:
        self._ending = ending
        status: Status = "completed" if ending.reason == "stop" else "incomplete"
        return b"".join([self._event(event) for event in self._end_item(status)])

    def closing(self, cost: Cost | None) -> bytes:
        final = self._final(cost)
        return self._lifecycle("incomplete" if final.status == "incomplete" else "completed", final)

    def error(self, error: ApiError) -> bytes:
        output = [*self._done, self._open.item("incomplete")] if self._open is not None else self._done
        failed = msgspec.structs.replace(self._response, status="failed", error=Failure.of(error), output=tuple(output))
        return self._lifecycle("failed", failed)

    def whole(self, pieces: Sequence[Piece], ending: Ending, cost: Cost) -> bytes:
        self.pieces(pieces)
        self.finish(ending)
        return _json(self._final(cost))

    def failure(self, error: ApiError) -> tuple[int, bytes]:
        return error.status, error.body()

    def _final(self, cost: Cost | None) -> ResponseObject:
        cut = self._ending is not None and self._ending.reason != "stop"
        final = msgspec.structs.replace(
            self._response,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=tuple(self._done),
            usage=ResponseUsage.of(cost) if cost is not None else None,
        )
        if self._keep is not None:
            self._keep(final)
        return final

    def _piece(self, piece: Piece) -> Iterator[Event]:
        match piece:
            case Reasoning(text) | Content(text):
                thoughts = isinstance(piece, Reasoning)
                if not isinstance(self._open, OpenText) or self._open.thoughts is not thoughts:
                    prefix = "rs" if thoughts else "msg"
                    yield from self._begin_item(OpenText(self._id(prefix), self._next_index, thoughts))
            case CallDelta():
                text = piece.arguments
                if piece.id:
                    custom = piece.name in self._custom
                    kind, prefix = (OpenCustomCall, "ctc") if custom else (OpenCall, "fc")
                    call = kind(self._id(prefix), self._next_index, piece.id, piece.name)
                    yield from self._begin_item(call)
        assert self._open is not None
        yield from self._open.add(text)
        if isinstance(piece, CallDelta) and piece.done:
            yield from self._end_item("completed")

    @property
    def _next_index(self) -> int:
        return len(self._done) + (self._open is not None)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{self._next_index}"

    def _begin_item(self, item: OpenItem) -> Iterator[Event]:
        yield from self._end_item("completed")
        self._open = item
        yield "output_item.added", {"output_index": len(self._done), "item": item.item("in_progress")}
        yield from item.begin()

    def _end_item(self, status: Status) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        yield from item.end()
        done = item.item(status)
        yield "output_item.done", {"output_index": len(self._done), "item": done}
        self._done.append(done)
        self._open = None

    def _lifecycle(
        self, name: Literal["created", "in_progress", "completed", "incomplete", "failed"], response: ResponseObject
    ) -> bytes:
        return self._event((name, {"response": response}))

    def _event(self, event: Event) -> bytes:
        name, fields = event
        data: dict[str, Any] = {"type": f"response.{name}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%b\ndata: %b\n\n" % (name.encode(), _json(data))
