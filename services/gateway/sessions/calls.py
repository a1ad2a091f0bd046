"""The table of generated tool calls: written with the batches of the one writer, bounded in rows and in bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, or_, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from services.gateway.sessions.models import ToolCallRow
from services.gateway.sessions.records import CallRecord

_ASKED = 500
"""Ids of one statement; SQLite's own limit is 999 in old versions."""


@dataclass(frozen=True, slots=True)
class CallBounds:
    """Of all generated calls together; the oldest go first."""

    rows: int = 20_000
    bytes: int = 64 * 2**20

    def within(self, other: "CallBounds") -> "CallBounds":
        return CallBounds(min(self.rows, other.rows), min(self.bytes, other.bytes))


CALLS_IN_MEMORY = CallBounds(1000, 16 * 2**20)
"""At most where there is no file."""


async def write_calls(connection: AsyncConnection, records: Sequence[CallRecord], bounds: CallBounds) -> None:
    """In the caller's transaction, and harmless when it is done twice. Raises what SQLAlchemy raises."""
    by_id = {record.id: record for record in records}
    written = await connection.scalars(select(ToolCallRow.id).where(ToolCallRow.id.in_(by_id)))
    for id in written.all():
        del by_id[id]
    if not by_id:
        return
    newest = select(ToolCallRow.start + ToolCallRow.size).order_by(ToolCallRow.number.desc()).limit(1)
    end = await connection.scalar(newest) or 0
    rows = []
    for record in by_id.values():
        rows.append({**_values(record), "start": end, "size": record.size})
        end += record.size
    await connection.execute(insert(ToolCallRow), rows)
    last = await connection.scalar(select(ToolCallRow.number).order_by(ToolCallRow.number.desc()).limit(1)) or 0
    beyond = or_(ToolCallRow.number <= last - bounds.rows, ToolCallRow.start < end - bounds.bytes)
    await connection.execute(delete(ToolCallRow).where(beyond))


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
    }
