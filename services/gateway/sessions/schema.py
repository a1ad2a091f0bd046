"""Brings a database file to the schema that this code knows."""

import functools
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

_MIGRATIONS = Path(__file__).parent / "migrations"


class NewerDatabase(Exception):
    """The file has a revision that this code does not know: a newer Samovar wrote it, and it must not be touched."""


def is_current(connection: Connection) -> bool:
    """Whether no migration is missing. Only reads. Raises NewerDatabase."""
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in _revisions():
        raise NewerDatabase(f"its schema is {current!r}, this version knows {', '.join(sorted(_revisions()))}")
    return current == _scripts().get_current_head()


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the missing migrations inside the connection's transaction: all of them or, on any error, none.

    `revision` is where to stop (a test begins at an older version). Raises NewerDatabase.
    """
    if is_current(connection):
        return
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


@functools.cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(_MIGRATIONS))


@functools.cache
def _revisions() -> frozenset[str]:
    return frozenset(script.revision for script in _scripts().walk_revisions())
