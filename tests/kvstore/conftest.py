from collections.abc import Iterator
from pathlib import Path

import pytest

from services.protocol import kv
from tests.kvstore.process import RawClient, StoreProcess, running


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "kv.sock"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """One process for all tests of a module that leave it running."""
    with running(tmp_path_factory.mktemp("kv") / "kv.sock") as process:
        yield process


@pytest.fixture
def client(store: StoreProcess) -> Iterator[RawClient]:
    """Connected to `store`, in which it finds no object of an earlier test."""
    with RawClient(store.path) as connected:
        connected.call(kv.Drop)
        yield connected
