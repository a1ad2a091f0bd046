"""The disk tier's journal: whatever happens to its bytes, what is read from it is what was written."""

from errno import ENOSPC
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.journal import MAGIC, Forget, Journal, Put, Record, framed, scan
from services.protocol.kv import Extent


def put(number: int) -> Put:
    key = b"key %d" % number
    extents = tuple(Extent(4096 * (number + piece), 4096) for piece in range(number % 3 + 1))
    return Put(key, b"parent", "model", 4096 * len(extents), 0.5, 0.25, False, 1e9 + number, number * 77, extents)


RECORDS: list[Record] = [*map(put, range(12)), Forget((b"key 3", b"key 4")), put(12), Forget(()), put(13)]
CONTENT = b"".join(map(framed, RECORDS))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(CONTENT)), st.integers(0, 40), st.binary(max_size=12))
def test_damage_costs_what_it_hit(position: int, cut: int, instead: bytes) -> None:
    damaged = CONTENT[:position] + instead + CONTENT[position + cut :]
    got = list(scan(damaged))
    good = [record for record in got if record is not None]
    expected = iter(RECORDS)
    assert all(any(record == other for other in expected) for record in good), "a record that was not written"
    assert len(good) >= len(RECORDS) - 4
    assert got.count(None) <= 2
    if damaged == CONTENT:
        assert got == RECORDS


def test_a_magic_within_a_damaged_record_misleads_nobody() -> None:
    first = framed(Put(MAGIC * 20, b"", "model", 1, 1, 1, False, 1, 1, (Extent(0, 1),)))
    damaged = bytearray(first + framed(put(1)))
    damaged[14] ^= 1
    assert list(scan(bytes(damaged))) == [None, put(1)]


def test_what_was_appended_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.journal", 2**20)
    assert list(journal.records()) == []
    journal.append(RECORDS[:5])
    journal.append(RECORDS[5:])
    journal.close()
    again = Journal(tmp_path / "a.journal", 2**20)
    assert list(again.records()) == RECORDS
    again.rewrite(RECORDS[2:4])
    again.append(RECORDS[7:8])
    assert list(again.records()) == [*RECORDS[2:4], RECORDS[7]]
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.journal"]


def test_a_full_journal_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.journal", len(CONTENT) - 1)
    for refused in (journal.append, journal.rewrite):
        with pytest.raises(OSError, match="full") as caught:
            refused(RECORDS)
        assert caught.value.errno == ENOSPC
    journal.append(RECORDS[:3])
    assert list(journal.records()) == RECORDS[:3]
    journal.close()
    assert (tmp_path / "a.journal").stat().st_size == journal.size


def test_a_rewrite_that_was_cut_off_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "a.draft").write_bytes(CONTENT[:100])
    journal = Journal(tmp_path / "a.journal", 2**20)
    journal.close()
    assert not (tmp_path / "a.draft").exists()
