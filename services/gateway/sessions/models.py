"""The tables of the session database. What they are in a file is decided by `migrations/`; a test compares the two.

No foreign keys: a session's row and its requests' rows are lost and pruned independently, and a parent's row may come
after its child's (a row is written when a request is over). All times are Unix seconds, all durations seconds.
"""

from typing import Any, ClassVar

from sqlalchemy import JSON, Float, Index
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    # SQLAlchemy 2.0 and 2.1 differ in what a float is by default.
    type_annotation_map: ClassVar = {float: Float()}


class SessionRow(Base):
    """Sums over all requests of a session, also over those that were pruned since."""

    __tablename__ = "sessions"
    __table_args__ = (Index("ix_sessions_last_seen", "last_seen"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    parent: Mapped[str | None]
    source: Mapped[str]
    first_seen: Mapped[float]
    last_seen: Mapped[float]
    turns: Mapped[int]
    prompt_tokens: Mapped[int]
    output_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    opening: Mapped[bytes]
    """`Conversation.opening`"""
    tail: Mapped[bytes]
    """`Conversation.tail`"""


class RequestRow(Base):
    """One finished request. `number` counts without gaps, since rows only ever go at the old end."""

    __tablename__ = "requests"
    __table_args__ = (
        Index("ix_requests_id", "id", unique=True),
        Index("ix_requests_session", "session_id", "number"),
        Index("ix_requests_arrived", "arrived"),
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str]
    session_id: Mapped[str | None]
    model: Mapped[str]
    engine: Mapped[str]
    arrived: Mapped[float]
    queue_seconds: Mapped[float]
    restore_seconds: Mapped[float]
    prefill_seconds: Mapped[float]
    decode_seconds: Mapped[float]
    prompt_tokens: Mapped[int]
    output_tokens: Mapped[int]
    cached_device: Mapped[int]
    cached_host: Mapped[int]
    cached_disk: Mapped[int]
    """Of `cached_host`."""
    computed_tokens: Mapped[int]
    missed: Mapped[Any | None] = mapped_column(JSON(none_as_null=True))
    """A `miss.Miss`"""
    finish_reason: Mapped[str]
    status: Mapped[int]
    error: Mapped[str]


class ResponseRow(Base):
    """One stored response of the Responses API: see `records.ResponseRecord`."""

    __tablename__ = "responses"
    __table_args__ = (
        Index("ix_responses_id", "id", unique=True),
        Index("ix_responses_chain", "chain"),
        # Holds all that pruning reads, so that it reads none of the texts.
        Index("ix_responses_used", "used", "number", "size"),
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str]
    chain: Mapped[str]
    previous: Mapped[str | None]
    created: Mapped[float]
    used: Mapped[float]
    """When the newest response of its chain was created: chains that nobody goes on with are pruned first."""
    size: Mapped[int]
    """`ResponseRecord.size`"""
    response: Mapped[bytes]
    items: Mapped[bytes]


class ToolCallRow(Base):
    """One call as it was generated: see `records.CallRecord`. Rows only ever go at the old end."""

    __tablename__ = "tool_calls"
    __table_args__ = (Index("ix_tool_calls_id", "id", unique=True), Index("ix_tool_calls_start", "start"))

    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str]
    language: Mapped[str]
    name: Mapped[str]
    arguments: Mapped[str]
    raw: Mapped[str]
    start: Mapped[int]
    """The `size` of all rows before this one, those that are gone included: pruning needs no sum."""
    size: Mapped[int]
    """`CallRecord.size`"""


class AnswerRow(Base):
    """One answer as it was generated: see `records.AnswerRecord`. Rows only ever go at the old end."""

    __tablename__ = "answers"
    __table_args__ = (
        Index("ix_answers_id", "id", unique=True),
        Index("ix_answers_place", "place"),
        Index("ix_answers_call", "call"),
        Index("ix_answers_start", "start"),
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str]
    place: Mapped[bytes]
    call: Mapped[str]
    """The first one of `calls`, or empty."""
    calls: Mapped[str]
    """One a line."""
    language: Mapped[str]
    lead: Mapped[str]
    thinking: Mapped[bool]
    whole: Mapped[bool]
    thoughts: Mapped[bytes]
    content: Mapped[bytes]
    ids: Mapped[bytes]
    start: Mapped[int]
    """The `size` of all rows before this one, those that are gone included: pruning needs no sum."""
    size: Mapped[int]
    """`AnswerRecord.size`"""
