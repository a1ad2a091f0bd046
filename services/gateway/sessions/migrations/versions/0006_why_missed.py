"""What of each prompt was on disk, what was computed, and why."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    for name in ("cached_disk", "computed_tokens"):
        op.add_column("requests", sa.Column(name, sa.Integer, nullable=False, server_default="0"))
    op.add_column("requests", sa.Column("missed", sa.JSON))
