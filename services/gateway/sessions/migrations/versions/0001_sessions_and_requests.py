"""Sessions and their requests."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("parent", sa.String, nullable=True),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("first_seen", sa.Float, nullable=False),
        sa.Column("last_seen", sa.Float, nullable=False),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
    )
    op.create_index("ix_sessions_last_seen", "sessions", ["last_seen"])
    op.create_table(
        "requests",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("session_id", sa.String, nullable=True),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("engine", sa.String, nullable=False),
        sa.Column("arrived", sa.Float, nullable=False),
        sa.Column("queue_seconds", sa.Float, nullable=False),
        sa.Column("restore_seconds", sa.Float, nullable=False),
        sa.Column("prefill_seconds", sa.Float, nullable=False),
        sa.Column("decode_seconds", sa.Float, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("cached_device", sa.Integer, nullable=False),
        sa.Column("cached_host", sa.Integer, nullable=False),
        sa.Column("finish_reason", sa.String, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("error", sa.String, nullable=False),
    )
    op.create_index("ix_requests_id", "requests", ["id"], unique=True)
    op.create_index("ix_requests_session", "requests", ["session_id", "number"])
    op.create_index("ix_requests_arrived", "requests", ["arrived"])
