"""The complete tool calls of one answer, for whoever keeps them."""

from collections.abc import Callable, Iterable

from services.gateway.output.pieces import CallDelta, Piece
from services.gateway.output.structure import CLOSE_CALL, OPEN_CALL
from services.gateway.sessions.records import CallRecord


class HeardCalls:
    """Hears an answer's pieces in order. A call that drifted from the family's tags is not given: where it comes back,
    the template's own way to write it is the better example."""

    def __init__(self, language: str, keep: Callable[[CallRecord], None]) -> None:
        """`language`: as `CallRecord.language`. `keep` is given each call when it is complete."""
        self._language = language
        self._keep = keep
        self._id = self._name = ""
        self._arguments: list[str] = []

    def hear(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if not isinstance(piece, CallDelta):
                continue
            if piece.id:
                self._id, self._name = piece.id, piece.name
                self._arguments.clear()
            self._arguments.append(piece.arguments)
            if piece.done and piece.raw.startswith(OPEN_CALL) and piece.raw.endswith(CLOSE_CALL):
                self._keep(CallRecord(self._id, self._language, self._name, "".join(self._arguments), piece.raw))
