import pytest
import torch

from services.engine.staging import Staging
from tests.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_written_is_there_and_the_last_two_are_kept(device: torch.device) -> None:
    staging = Staging(8, device)
    place, hosts = staging.device.data_ptr(), []
    for number in range(1, 8):
        host = staging.host()
        hosts.append(host)
        host.fill_(number)
        staging.copy()
        assert staging.device.tolist() == [number] * 8
        assert [int(kept[0]) for kept in hosts[-3:]] == list(range(max(1, number - 2), number + 1))
    assert staging.device.data_ptr() == place
