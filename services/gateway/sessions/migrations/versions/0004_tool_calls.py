"""Tool calls as they were generated."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "tool_calls",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("language", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("arguments", sa.String, nullable=False),
        sa.Column("raw", sa.String, nullable=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
    )
    op.create_index("ix_tool_calls_id", "tool_calls", ["id"], unique=True)
    op.create_index("ix_tool_calls_start", "tool_calls", ["start"])
