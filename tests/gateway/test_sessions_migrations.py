"""The database file through its versions."""

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, event

from services.gateway.miss import Miss
from services.gateway.sessions import RequestRecord, SessionHint, SessionStore, schema
from services.gateway.sessions.models import Base
from services.protocol.generate import Usage

VERSION_1_SESSION = "INSERT INTO sessions VALUES ('old', NULL, 'header', 1.0, 2.0, 3, 40, 50, 6)"


def at_revision(path: Path, revision: str) -> None:
    engine = create_engine(f"sqlite:///{path}")
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with engine.begin() as connection:
        schema.upgrade(connection, revision)
    engine.dispose()


def columns(path: Path, table: str) -> set[str]:
    reader = sqlite3.connect(path)
    try:
        return {row[1] for row in reader.execute(f"PRAGMA table_info({table})")}
    finally:
        reader.close()


async def test_an_empty_file_gets_the_schema_of_the_models(tmp_path: Path) -> None:
    store = SessionStore(str(tmp_path / "s.db"), 100)
    await store.start()
    await store.close()

    def differences(connection: Connection) -> list[object]:
        return compare_metadata(MigrationContext.configure(connection), Base.metadata)

    engine = create_engine(f"sqlite:///{tmp_path / 's.db'}")
    with engine.connect() as connection:
        assert differences(connection) == []
        assert schema.is_current(connection)
    engine.dispose()


async def test_a_file_of_revision_1_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    at_revision(path, "0001")
    assert "tail" not in columns(path, "sessions")
    with sqlite3.connect(path) as old:
        old.execute(VERSION_1_SESSION)
    old.close()

    store = SessionStore(str(path), 100)
    await store.start()
    session = store.resolve(SessionHint(opening=b"o" * 16, header="old"), [bytes(32)])
    store.record(
        RequestRecord(
            request_id="r",
            session_id=session,
            model="m",
            arrived=9.0,
            status=200,
            usage=Usage(prompt_tokens=2, output_tokens=1),
        )
    )
    assert await store.flush(5)
    detail = await store.session("old", requests=10)
    assert detail is not None
    assert (detail.session.first_seen, detail.session.last_seen) == (1.0, 9.0)
    assert (detail.session.turns, detail.session.prompt_tokens) == (4, 42)
    await store.close()
    assert store.dropped_rows == 0


async def test_requests_of_revision_5_say_nothing_of_what_they_missed(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    at_revision(path, "0005")
    with sqlite3.connect(path) as old:
        old.execute("INSERT INTO sessions VALUES ('s', NULL, 'header', 1.0, 1.0, 1, 9, 2, 5, x'', x'')")
        row = (1, "old", "s", "m", "e", 1.0, 0.1, 0.2, 0.3, 0.4, 9, 2, 3, 2, "stop", 200, "")
        old.execute(f"INSERT INTO requests VALUES ({', '.join('?' * len(row))})", row)
    old.close()

    store = SessionStore(str(path), 100)
    await store.start()
    miss = Miss(
        reason="diverged", text="diverged at token 4", found=3, known=3, diverged_at=4, message=-1, role="tools"
    )
    usage = Usage(prompt_tokens=9, output_tokens=2, cached_host=3, cached_disk=2, computed_tokens=6)
    store.record(
        RequestRecord(request_id="new", session_id="s", model="m", arrived=2.0, status=200, usage=usage, missed=miss)
    )
    assert await store.flush(5)
    detail = await store.session("s", requests=10)
    assert detail is not None
    new, old_one = detail.requests
    assert (new.cached_host, new.cached_disk, new.computed_tokens, new.missed) == (3, 2, 6, miss)
    assert (old_one.cached_host, old_one.cached_disk, old_one.computed_tokens, old_one.missed) == (2, 0, 0, None)
    await store.close()
    reader = sqlite3.connect(path)
    reasons = reader.execute("SELECT id, json_extract(missed, '$.reason') FROM requests ORDER BY number").fetchall()
    reader.close()
    assert reasons == [("old", None), ("new", "diverged")]


async def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    at_revision(path, "0001")
    with sqlite3.connect(path) as old:
        old.execute("ALTER TABLE sessions ADD COLUMN tail BLOB")  # 0002 fails here, after it added `opening`
    old.close()
    before = columns(path, "sessions")

    store = SessionStore(str(path), 100)
    await store.start()
    await store.close()
    assert columns(path, "sessions") == before
    assert "opening" not in before
    reader = sqlite3.connect(path)
    assert reader.execute("SELECT version_num FROM alembic_version").fetchall() == [("0001",)]
    reader.close()


def test_a_newer_revision_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    at_revision(path, "head")
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(schema.NewerDatabase, match=r"9999.*0002"):
            schema.upgrade(connection)
    engine.dispose()
