"""Run by alembic for `schema.upgrade`, which hands over the connection; its transaction is the caller's."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
