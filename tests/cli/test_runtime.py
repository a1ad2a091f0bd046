"""services.cli.runtime: the folder of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.runtime import LONGEST_SOCKET_PATH, Runtime


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_folder_is_private_and_goes(temp: Path):
    runtime = Runtime.make()
    assert runtime.folder.parent == temp
    assert runtime.folder.stat().st_mode & 0o777 == 0o700
    runtime.note(pid=1, children={})
    runtime.note(children={"nats": 2})
    assert json.loads(runtime.state_file.read_text()) == {"pid": 1, "children": {"nats": 2}}
    runtime.remove()
    assert list(temp.iterdir()) == []


def test_only_the_folder_of_a_dead_run_is_swept(temp: Path):
    source = (
        f"import tempfile; tempfile.tempdir = {str(temp)!r}\nfrom services.cli.runtime import Runtime; Runtime.make()"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
    (dead,) = temp.iterdir()
    (temp / "samovar-other").mkdir()  # not made by us: has no lock
    first = Runtime.make()
    assert not dead.exists()
    second = Runtime.make()
    assert {path.name for path in temp.iterdir()} == {first.folder.name, second.folder.name, "samovar-other"}
    first.remove()
    second.remove()


def test_socket_path_stays_short_enough_for_an_address(temp: Path, monkeypatch: pytest.MonkeyPatch):
    deep = temp / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    runtime = Runtime.make()
    try:
        assert len(str(runtime.kv_socket)) <= LONGEST_SOCKET_PATH
    finally:
        runtime.remove()


def test_a_note_that_cannot_be_written_is_lost(temp: Path):
    runtime = Runtime.make()
    runtime.remove()
    runtime.note(pid=1)
    assert not runtime.state_file.exists()
