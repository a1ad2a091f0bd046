"""Answers as they were generated."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "answers",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("place", sa.LargeBinary, nullable=False),
        sa.Column("call", sa.String, nullable=False),
        sa.Column("calls", sa.String, nullable=False),
        sa.Column("language", sa.String, nullable=False),
        sa.Column("lead", sa.String, nullable=False),
        sa.Column("thinking", sa.Boolean, nullable=False),
        sa.Column("whole", sa.Boolean, nullable=False),
        sa.Column("thoughts", sa.LargeBinary, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.Column("ids", sa.LargeBinary, nullable=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
    )
    op.create_index("ix_answers_id", "answers", ["id"], unique=True)
    op.create_index("ix_answers_place", "answers", ["place"])
    op.create_index("ix_answers_call", "answers", ["call"])
    op.create_index("ix_answers_start", "answers", ["start"])
