"""Tables that only grow at the new end and are cut at the old one: bounded in rows and in bytes without a sum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, or_, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.gateway.sessions.models import AnswerRow, ToolCallRow


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Of all rows of a table together; the oldest go first."""

    rows: int = 20_000
    bytes: int = 64 * 2**20

    def within(self, other: "RowBounds") -> "RowBounds":
        return RowBounds(min(self.rows, other.rows), min(self.bytes, other.bytes))


async def append(
    connection: AsyncConnection,
    table: type[ToolCallRow | AnswerRow],
    rows: Sequence[Mapping[str, Any]],
    bounds: RowBounds,
) -> None:
    """Rows, each with its `id` and `size`, behind those that are there, but for ids that are there already; then what
    is beyond the bounds goes. In the caller's transaction. Raises what SQLAlchemy raises."""
    by_id = {row["id"]: row for row in rows}
    written = await connection.scalars(select(table.id).where(table.id.in_(by_id)))
    for id in written.all():
        del by_id[id]
    if not by_id:
        return
    newest = select(table.start + table.size).order_by(table.number.desc()).limit(1)
    end = await connection.scalar(newest) or 0
    placed = []
    for row in by_id.values():
        placed.append({**row, "start": end})
        end += row["size"]
    await connection.execute(insert(table), placed)
    last = await connection.scalar(select(table.number).order_by(table.number.desc()).limit(1)) or 0
    beyond = or_(table.number <= last - bounds.rows, table.start < end - bounds.bytes)
    await connection.execute(delete(table).where(beyond))
