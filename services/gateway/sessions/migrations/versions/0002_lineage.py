"""Where each session's newest prompt ended, so that prompt lineage survives a restart of the gateway."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("opening", sa.LargeBinary, nullable=False, server_default=sa.text("x''")))
    op.add_column("sessions", sa.Column("tail", sa.LargeBinary, nullable=False, server_default=sa.text("x''")))
