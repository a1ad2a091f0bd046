"""Whatever is wrong with the file costs rows, never an answer, and is over when the file can be used again."""

import asyncio
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from services.gateway.sessions import RequestRecord, SessionHint, SessionStore
from services.gateway.sessions.database import SessionsUnavailable
from services.gateway.sessions.writer import Limits
from services.protocol.generate import Usage

QUICK = Limits(queue_rows=50, batch_rows=16, busy_seconds=0.05, retry_first=0.02, retry_longest=0.1)
USAGE = Usage(prompt_tokens=10, output_tokens=2)


def record(request_id: str) -> RequestRecord:
    return RequestRecord(request_id=request_id, session_id="s", model="m", arrived=1.0, status=200, usage=USAGE)


def rows(path: Path) -> int:
    reader = sqlite3.connect(path)
    try:
        return reader.execute("SELECT count(*) FROM requests").fetchone()[0]
    finally:
        reader.close()


async def healthy(path: Path) -> SessionStore:
    store = SessionStore(str(path), 1000, QUICK)
    await store.start()
    store.record(record("first"))
    assert await store.flush(5)
    return store


@pytest.mark.parametrize("locked_at_start", [False, True])
async def test_a_locked_file(tmp_path: Path, locked_at_start: bool) -> None:
    path = tmp_path / "s.db"
    await (await healthy(path)).close()
    holder = sqlite3.connect(path, isolation_level=None)
    store = SessionStore(str(path), 1000, QUICK)
    if not locked_at_start:
        await store.start()
    holder.execute("BEGIN EXCLUSIVE")
    if locked_at_start:
        await store.start()
    began = time.perf_counter()
    for n in range(200):
        store.record(record(f"r{n}"))
        store.resolve(SessionHint(opening=b"x"), [bytes(32)])
    assert time.perf_counter() - began < 0.5
    assert store.waiting_rows == QUICK.queue_rows
    assert store.dropped_rows == 150
    assert not await store.flush(0.3)
    assert (await store.sessions(limit=10, offset=0)).total == 1, "readers do not wait for the lock"
    holder.execute("ROLLBACK")
    holder.close()
    assert await store.flush(10)
    assert store.dropped_rows == 150
    assert rows(path) == 1 + QUICK.queue_rows
    await store.close()


async def test_close_does_not_wait_for_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = await healthy(path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    for n in range(10):
        store.record(record(f"r{n}"))
    async with asyncio.timeout(3):
        await store.close()
    assert store.dropped_rows == 10
    assert store.waiting_rows == 0
    holder.close()


async def test_a_corrupt_file_at_start_that_is_moved_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(b"this is no database" * 1000)
    store = SessionStore(str(path), 1000, QUICK)
    await store.start()
    store.record(record("r1"))
    assert not await store.flush(0.2)
    with pytest.raises(SessionsUnavailable):
        await store.sessions(limit=10, offset=0)
    (complaint,) = (entry for entry in caplog.records if "sessions" in entry.name)
    assert "file is not a database" in complaint.getMessage()
    assert complaint.exc_info is None
    assert path.read_bytes() == b"this is no database" * 1000, "it may be the user's only copy"
    path.unlink()
    assert await store.flush(10)
    assert rows(path) == 1
    assert store.dropped_rows == 0
    await store.close()


async def test_a_file_with_a_broken_page(tmp_path: Path) -> None:
    """It opens, and fails only when it is written to."""
    path = tmp_path / "s.db"
    await (await healthy(path)).close()
    reader = sqlite3.connect(path)
    (root,) = reader.execute("SELECT rootpage FROM sqlite_master WHERE name = 'requests'").fetchone()
    (page_size,) = reader.execute("PRAGMA page_size").fetchone()
    reader.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * page_size)
        file.write(b"\xa5" * page_size)

    store = SessionStore(str(path), 1000, QUICK)
    await store.start()
    assert (await store.sessions(limit=10, offset=0)).total == 1
    for n in range(60):
        store.record(record(f"r{n}"))
    assert not await store.flush(0.3)
    assert store.dropped_rows == 10
    for name in os.listdir(tmp_path):
        (tmp_path / name).unlink()
    assert await store.flush(10)
    assert rows(path) == QUICK.queue_rows
    await store.close()


@pytest.mark.parametrize("fate", ["removed", "replaced"])
async def test_a_file_that_is_swapped_under_way(tmp_path: Path, fate: str) -> None:
    """SQLite itself would go on writing to the file that has no name any more."""
    path = tmp_path / "s.db"
    await (await healthy(path)).close()
    backup = tmp_path / "backup.db"
    shutil.copy(path, backup)
    store = await healthy(path)
    store.record(record("second"))
    await store.flush(5)
    path.unlink()
    if fate == "replaced":
        path.with_name("s.db-wal").unlink()
        path.with_name("s.db-shm").unlink()
        backup.replace(path)
    store.record(record("third"))
    assert await store.flush(10)
    await store.close()
    assert rows(path) == (1 if fate == "removed" else 2)


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    blocker = tmp_path / "data"
    blocker.write_text("a file where the folder should be")
    store = SessionStore(str(blocker / "s.db"), 1000, QUICK)
    await store.start()
    store.record(record("r1"))
    assert not await store.flush(0.1)
    blocker.unlink()
    assert await store.flush(10)
    assert rows(blocker / "s.db") == 1
    await store.close()


async def test_a_newer_database_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s.db"
    await (await healthy(path)).close()
    with sqlite3.connect(path) as newer:
        newer.execute("UPDATE alembic_version SET version_num = '9999'")
        newer.execute("ALTER TABLE sessions RENAME TO conversations")
    newer.close()
    before = path.read_bytes()

    store = SessionStore(str(path), 1000, QUICK)
    await store.start()
    assert "newer version" in caplog.text
    assert str(path) in caplog.text
    assert not store.persistent
    store.record(record("r1"))
    assert await store.flush(5)
    page = await store.sessions(limit=10, offset=0)
    assert page.total == 1
    assert not page.persistent
    await store.close()
    assert path.read_bytes() == before
    assert store.dropped_rows == 0


async def test_complaints_are_rare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = SessionStore(str(tmp_path), 1000, QUICK)  # a folder
    await store.start()
    for n in range(500):
        store.record(record(f"r{n}"))
    assert not await store.flush(0.3)  # several tries
    assert store.dropped_rows == 450
    assert len([entry for entry in caplog.records if "sessions" in entry.name]) == 1
    await store.close()
    assert store.dropped_rows == 500
    last = caplog.records[-1].getMessage()
    assert "500 rows lost" in last, "the sum is told at the end"


async def test_a_file_that_comes_and_goes_is_no_flood_of_complaints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "s.db"
    store = await healthy(path)
    holder = sqlite3.connect(path, isolation_level=None)
    for n in range(3):
        holder.execute("BEGIN IMMEDIATE")
        store.record(record(f"r{n}"))
        assert not await store.flush(0.2)
        holder.execute("ROLLBACK")
        assert await store.flush(10)
    holder.close()
    await store.close()
    said = [entry.getMessage() for entry in caplog.records if "sessions" in entry.name]
    assert len(said) == 2
    assert "database is locked" in said[0]
    assert "can be used again" in said[1]
    assert store.dropped_rows == 0


FULL_DISK = """
import asyncio, resource, signal, sys
from pathlib import Path
from tests.gateway.test_sessions_faults import QUICK, healthy, record, rows

async def main(path):
    store = await healthy(path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))  # no file may grow any more
    for n in range(60):
        store.record(record(f"r{n}" + "x" * 4000))
    assert not await store.flush(0.5)
    assert store.dropped_rows == 10, store.dropped_rows
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert await store.flush(10)
    assert store.dropped_rows == 10, store.dropped_rows
    await store.close()
    assert rows(path) == 51

asyncio.run(main(Path(sys.argv[1])))
"""

READ_ONLY = """
import asyncio, os, sys
from pathlib import Path
from tests.gateway.test_sessions_faults import QUICK, healthy, record, rows
from services.gateway.sessions import SessionStore

async def main(path):
    await (await healthy(path)).close()
    path.chmod(0o444)
    path.parent.chmod(0o555)
    owner = os.geteuid()
    if owner == 0:  # to root nothing is read-only
        os.seteuid(65534)
    store = SessionStore(str(path), 1000, QUICK)
    await store.start()
    for n in range(60):
        store.record(record(f"r{n}"))
    assert not await store.flush(0.3)
    assert store.dropped_rows == 10, store.dropped_rows
    os.seteuid(owner)
    path.chmod(0o644)
    path.parent.chmod(0o755)
    assert await store.flush(10)
    await store.close()
    assert rows(path) == 51

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits and modes")
@pytest.mark.parametrize("script", [FULL_DISK, READ_ONLY], ids=["full disk", "read-only"])
def test_in_a_process_of_its_own(script: str) -> None:
    # Not tmp_path, which another user cannot enter when root runs the tests.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", script, str(Path(folder) / "s.db")],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
