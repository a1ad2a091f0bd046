"""What one finished request puts into the tables."""

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import case, func
from sqlalchemy.dialects.sqlite import insert

from services.gateway.sessions.models import SessionRow
from services.gateway.sessions.records import AnswerRecord, CallRecord, ForgottenResponse, RequestRecord, ResponseRecord
from services.protocol.generate import Usage

_NO_USAGE = Usage(prompt_tokens=0, output_tokens=0)


@dataclass(frozen=True, slots=True)
class Entry:
    """One request to write, with what was known of its session when it was recorded."""

    record: RequestRecord
    source: str
    parent: str | None
    opening: bytes
    tail: bytes
    """Empty where the session's lineage is not known (any more): what the database has is kept."""


Row = Entry | ResponseRecord | ForgottenResponse | CallRecord | AnswerRecord
"""All that the one writer is handed."""


def size(row: Row) -> int:
    """Bytes that a row holds while it waits, of those that may be large."""
    return row.size if isinstance(row, ResponseRecord | CallRecord | AnswerRecord) else 0


def text(value: str) -> str:
    """A string that SQLite takes (no lone surrogates)."""
    return value.encode("utf-8", "replace").decode()


def session_values(entry: Entry) -> dict[str, Any]:
    record = entry.record
    usage = record.usage or _NO_USAGE
    return {
        "id": text(record.session_id),
        "parent": entry.parent,
        "source": entry.source,
        "first_seen": record.arrived,
        "last_seen": record.arrived,
        "turns": int(record.usage is not None),
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
        "opening": entry.opening,
        "tail": entry.tail,
    }


def request_values(record: RequestRecord) -> dict[str, Any]:
    usage = record.usage or _NO_USAGE
    return {
        "id": text(record.request_id),
        "session_id": text(record.session_id) or None,
        "model": text(record.model),
        "engine": text(record.engine_id),
        "arrived": record.arrived,
        "queue_seconds": usage.queue_seconds,
        "restore_seconds": usage.restore_seconds,
        "prefill_seconds": usage.prefill_seconds,
        "decode_seconds": usage.decode_seconds,
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.output_tokens,
        "cached_device": usage.cached_device,
        "cached_host": usage.cached_host,
        "cached_disk": usage.cached_disk,
        "computed_tokens": usage.computed_tokens,
        "missed": None if record.missed is None else msgspec.to_builtins(record.missed),
        "finish_reason": text(record.finish_reason),
        "status": record.status,
        "error": text(record.error),
    }


def _upsert() -> Any:
    new = insert(SessionRow)
    known_lineage = func.length(new.excluded.tail) > 0
    return new.on_conflict_do_update(
        index_elements=[SessionRow.id],
        set_={
            "first_seen": func.min(SessionRow.first_seen, new.excluded.first_seen),
            "last_seen": func.max(SessionRow.last_seen, new.excluded.last_seen),
            "turns": SessionRow.turns + new.excluded.turns,
            "prompt_tokens": SessionRow.prompt_tokens + new.excluded.prompt_tokens,
            "output_tokens": SessionRow.output_tokens + new.excluded.output_tokens,
            "cached_tokens": SessionRow.cached_tokens + new.excluded.cached_tokens,
            "opening": case((known_lineage, new.excluded.opening), else_=SessionRow.opening),
            "tail": case((known_lineage, new.excluded.tail), else_=SessionRow.tail),
        },
    )


UPSERT_SESSION = _upsert()
"""For values of `session_values`: sums grow, and a lineage that is not known leaves the old one."""
