"""services.cli.machine: memory, ports, GPUs."""

import os
import socket
from pathlib import Path

import psutil
import pytest

from services.cli import machine
from tests.ports import free_port


def test_available_memory_is_the_containers_where_that_is_less(tmp_path: Path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert machine.available_memory(tmp_path) == 600_000
    (tmp_path / "memory.current").write_text("2000000\n")
    assert machine.available_memory(tmp_path) == 0


def test_available_memory_of_a_container_with_the_old_cgroups(tmp_path: Path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("5000\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("1000\n")
    assert machine.available_memory(tmp_path) == 4000


def test_available_memory_without_a_limit_is_the_machines(tmp_path: Path):
    (tmp_path / "memory.max").write_text("max\n")
    assert 0 < machine.available_memory(tmp_path) <= psutil.virtual_memory().total


def test_ports():
    port = free_port()
    machine.check_port("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(machine.PortTaken):
            machine.check_port("127.0.0.1", port)
        with pytest.raises(machine.PortTaken):
            machine.check_port("0.0.0.0", port)
    machine.check_port("localhost", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_address_that_is_not_ours(host: str):
    with pytest.raises(machine.AddressUnusable, match=host):
        machine.check_port(host, 12345)


def nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_gpus_are_those_that_the_user_allows(tmp_path: Path):
    environ = nvidia_smi(tmp_path, "echo GPU-a; echo GPU-b")
    assert machine.gpus(environ) == ("GPU-a", "GPU-b")
    assert machine.gpus(environ | {"CUDA_VISIBLE_DEVICES": "3, 1"}) == ("3", "1")
    assert machine.gpus(environ | {"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_no_gpus_without_a_tool_or_with_a_broken_driver(tmp_path: Path):
    assert machine.gpus({"PATH": str(tmp_path)}) == ()
    assert machine.gpus(nvidia_smi(tmp_path, "echo 'no driver'; exit 9")) == ()
