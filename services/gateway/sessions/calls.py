"""The table of generated tool calls: written with the batches of the one writer, bounded in rows and in bytes."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from services.gateway.sessions.bounded import RowBounds, append
from services.gateway.sessions.models import ToolCallRow
from services.gateway.sessions.records import CallRecord

_ASKED = 500
"""Ids of one statement; SQLite's own limit is 999 in old versions."""

CALLS_IN_MEMORY = RowBounds(1000, 16 * 2**20)
"""At most where there is no file."""


async def write_calls(connection: AsyncConnection, records: Sequence[CallRecord], bounds: RowBounds) -> None:
    """In the caller's transaction, and harmless when it is done twice. Raises what SQLAlchemy raises."""
    await append(connection, ToolCallRow, [_values(record) for record in records], bounds)


async def read_calls(session: AsyncSession, ids: Sequence[str]) -> list[CallRecord]:
    """Those of these calls that are known, in any order."""
    found: list[CallRecord] = []
    for place in range(0, len(ids), _ASKED):
        some = select(ToolCallRow).where(ToolCallRow.id.in_(ids[place : place + _ASKED]))
        rows = await session.scalars(some)
        found += [CallRecord(row.id, row.language, row.name, row.arguments, row.raw) for row in rows]
    return found


def _values(record: CallRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "language": record.language,
        "name": record.name,
        "arguments": record.arguments,
        "raw": record.raw,
        "size": record.size,
    }
