"""One answer as the model writes it, for whoever keeps it."""

from collections.abc import Callable, Collection, Iterable, Sequence

from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning
from services.gateway.prompt.written_answer import content_digest, thoughts_digest
from services.gateway.sessions.records import AnswerRecord
from services.protocol.generate import pack_ids


class HeardAnswer:
    """Hears an answer's pieces in order, and reads its tokens where they gather."""

    def __init__(
        self,
        id: str,
        *,
        place: bytes,
        language: str,
        lead: str,
        thinking: bool,
        tokens: Sequence[int],
        stop_ids: Collection[int],
        keep: Callable[[AnswerRecord], None],
    ) -> None:
        """`tokens` grows with the answer; the other fields are those of AnswerRecord. `stop_ids` end a turn. `keep` is
        given the record when the answer is over."""
        self.id = id
        self.over = False
        self.place = place
        self._language = language
        self._lead = lead
        self._thinking = thinking
        self._tokens = tokens
        self._stop_ids = stop_ids
        self._keep = keep
        self._thoughts: list[str] = []
        self._content: list[str] = []
        self._calls: list[str] = []
        self._done = 0

    def hear(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self._thoughts.append(text)
                case Content(text):
                    self._content.append(text)
                case CallDelta():
                    if piece.id:
                        self._calls.append(piece.id)
                    self._done += piece.done

    def end(self, whole: bool) -> None:
        """It is over. `whole`: the model ended it, and the client was given all of it."""
        if not self.over:
            self.over = True
            self._keep(self.record(whole))

    def drop(self) -> None:
        """Another one goes on with it."""
        self.over = True

    def record(self, whole: bool = False) -> AnswerRecord:
        """What there is of it just now."""
        ids = list(self._tokens)
        if whole and ids and ids[-1] in self._stop_ids:
            ids.pop()
        return AnswerRecord(
            id=self.id,
            place=self.place,
            calls=tuple(self._calls[: self._done]),
            language=self._language,
            lead=self._lead,
            thinking=self._thinking,
            whole=whole and self._done == len(self._calls),
            thoughts=thoughts_digest("".join(self._thoughts)),
            content=content_digest("".join(self._content)),
            ids=pack_ids(ids),
        )
