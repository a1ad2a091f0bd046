"""The stored responses of the Responses API."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("chain", sa.String, nullable=False),
        sa.Column("previous", sa.String, nullable=True),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("used", sa.Float, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("items", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_responses_id", "responses", ["id"], unique=True)
    op.create_index("ix_responses_chain", "responses", ["chain"])
    op.create_index("ix_responses_used", "responses", ["used", "number", "size"])
