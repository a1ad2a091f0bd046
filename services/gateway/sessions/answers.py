"""The table of generated answers: written with the batches of the one writer, bounded in rows and in bytes."""

from collections.abc import Iterable, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from services.gateway.sessions.bounded import RowBounds, append
from services.gateway.sessions.models import AnswerRow
from services.gateway.sessions.records import AnswerRecord

_ASKED = 500
"""Keys of one statement; SQLite's own limit is 999 in old versions."""

ANSWERS_IN_MEMORY = RowBounds(1000, 16 * 2**20)
"""At most where there is no file."""


async def write_answers(connection: AsyncConnection, records: Sequence[AnswerRecord], bounds: RowBounds) -> None:
    """In the caller's transaction, and harmless when it is done twice. Raises what SQLAlchemy raises."""
    await append(connection, AnswerRow, [_values(record) for record in records], bounds)


async def read_answers(session: AsyncSession, places: Sequence[bytes], calls: Sequence[str]) -> list[AnswerRecord]:
    """Those that were given at one of these places, or whose first call is one of these; the oldest first."""
    found: dict[int, AnswerRow] = {}
    for column, keys in ((AnswerRow.place, places), (AnswerRow.call, calls)):
        for start in range(0, len(keys), _ASKED):
            rows = await session.scalars(select(AnswerRow).where(column.in_(keys[start : start + _ASKED])))
            found.update((row.number, row) for row in rows)
    return list(_records(found[number] for number in sorted(found)))


def _records(rows: Iterable[AnswerRow]) -> Iterable[AnswerRecord]:
    for row in rows:
        yield AnswerRecord(
            id=row.id,
            place=row.place,
            calls=tuple(row.calls.split("\n")) if row.calls else (),
            language=row.language,
            lead=row.lead,
            thinking=row.thinking,
            whole=row.whole,
            thoughts=row.thoughts,
            content=row.content,
            ids=row.ids,
        )


def _values(record: AnswerRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "place": record.place,
        "call": record.calls[0] if record.calls else "",
        "calls": "\n".join(record.calls),
        "language": record.language,
        "lead": record.lead,
        "thinking": record.thinking,
        "whole": record.whole,
        "thoughts": record.thoughts,
        "content": record.content,
        "ids": record.ids,
        "size": record.size,
    }
