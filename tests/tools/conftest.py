from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tools.corpus import make_data
from tools.train.data.dataset import Dataset
from tools.train.tasks.source import Source


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices: more threads only wait for each other. And sums are then added in one order on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    return make_data(folder / "corpus", folder / "data")


@pytest.fixture(scope="session")
def train_source(data: Path) -> Source:
    """For its dataset and tables: tests take `.reseeded(...)`."""
    return Source(Dataset(data, "train"), "")


@pytest.fixture(scope="session")
def held_source(data: Path) -> Source:
    return Source(Dataset(data, "held"), "")
