"""The table of stored responses: written with the batches of the one writer, bounded in rows and in bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from services.gateway.sessions.models import ResponseRow
from services.gateway.sessions.records import ForgottenResponse, ResponseRecord


@dataclass(frozen=True, slots=True)
class ResponseBounds:
    """Of all stored responses together; the chains that were used least recently go first, each from its beginning."""

    rows: int = 10_000
    bytes: int = 256 * 2**20

    def within(self, other: "ResponseBounds") -> "ResponseBounds":
        return ResponseBounds(min(self.rows, other.rows), min(self.bytes, other.bytes))


IN_MEMORY = ResponseBounds(1000, 32 * 2**20)
"""At most where there is no file."""


async def write_responses(
    connection: AsyncConnection, rows: Sequence[ResponseRecord | ForgottenResponse], bounds: ResponseBounds
) -> None:
    """In the caller's transaction, and harmless when it is done twice. Raises what SQLAlchemy raises."""
    records = [row for row in rows if isinstance(row, ResponseRecord)]
    if records:
        new = insert(ResponseRow).on_conflict_do_nothing(index_elements=[ResponseRow.id])
        await connection.execute(new, [_values(record) for record in records])
        for record in records:
            of_chain = update(ResponseRow).where(ResponseRow.chain == record.chain, ResponseRow.used < record.created)
            await connection.execute(of_chain.values(used=record.created))
    if gone := [row.id for row in rows if isinstance(row, ForgottenResponse)]:
        await connection.execute(delete(ResponseRow).where(ResponseRow.id.in_(gone)))
    if records:
        await _prune(connection, bounds)


async def read_response(session: AsyncSession, id: str) -> ResponseRecord | None:
    row = await session.scalar(select(ResponseRow).where(ResponseRow.id == id))
    if row is None:
        return None
    return ResponseRecord(
        id=row.id,
        chain=row.chain,
        previous=row.previous,
        created=row.created,
        response=row.response,
        items=row.items,
    )


def _values(record: ResponseRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "chain": record.chain,
        "previous": record.previous,
        "created": record.created,
        "used": record.created,
        "size": record.size,
        "response": record.response,
        "items": record.items,
    }


async def _prune(connection: AsyncConnection, bounds: ResponseBounds) -> None:
    rows, size = (await connection.execute(select(func.count(), func.sum(ResponseRow.size)))).one()
    if rows <= bounds.rows and (size or 0) <= bounds.bytes:
        return
    newest_first = (ResponseRow.used.desc(), ResponseRow.number.desc())
    kept = select(
        ResponseRow.number,
        func.row_number().over(order_by=newest_first).label("rows"),
        func.sum(ResponseRow.size).over(order_by=newest_first).label("size"),
    ).subquery()
    beyond = select(kept.c.number).where(or_(kept.c.rows > bounds.rows, kept.c.size > bounds.bytes))
    await connection.execute(delete(ResponseRow).where(ResponseRow.number.in_(beyond)))
