from pathlib import Path

import pytest

from services.kvstore.arena import Arena, arena_size
from services.kvstore.memory import MemoryLimit, memory_limit
from services.settings import SettingsError

GIB = 2**30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\nSwapFree: 0 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    return tmp_path / "proc"


def limit_file(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text + "\n")


def test_the_real_machine_has_memory() -> None:
    assert memory_limit().bytes > 0


def test_without_a_cgroup_limit_it_is_what_is_available(proc: Path, tmp_path: Path) -> None:
    limit_file(tmp_path / "cgroup", "memory.max", "max")
    assert memory_limit(proc, tmp_path / "cgroup") == MemoryLimit(8 * GIB, "memory available on this machine")


def test_cgroup_v2_inside_a_container(proc: Path, tmp_path: Path) -> None:
    limit_file(tmp_path / "cgroup", "memory.max", str(2 * GIB))
    assert memory_limit(proc, tmp_path / "cgroup") == MemoryLimit(2 * GIB, "memory limit of this container")


def test_cgroup_v2_limit_of_a_cgroup_above_ours(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/a.slice/b.service\n")
    limit_file(tmp_path / "cgroup/a.slice/b.service", "memory.max", "max")
    limit_file(tmp_path / "cgroup/a.slice", "memory.max", str(3 * GIB))
    assert memory_limit(proc, tmp_path / "cgroup").bytes == 3 * GIB


@pytest.mark.parametrize("seen_as", ["docker/f00", "."])
def test_cgroup_v1(proc: Path, tmp_path: Path, seen_as: str) -> None:
    (proc / "self/cgroup").write_text("8:pids:/x\n4:cpu,memory:/docker/f00\n0::/\n")
    limit_file(tmp_path / "cgroup/memory" / seen_as, "memory.limit_in_bytes", str(GIB))
    assert memory_limit(proc, tmp_path / "cgroup").bytes == GIB


def test_cgroup_v1_without_limit(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("4:memory:/\n")
    limit_file(tmp_path / "cgroup/memory", "memory.limit_in_bytes", "9223372036854771712")
    assert memory_limit(proc, tmp_path / "cgroup").bytes == 8 * GIB


def test_an_arena_that_the_machine_cannot_hold_is_refused() -> None:
    limit = MemoryLimit(2 * GIB, "memory limit of this container")
    assert arena_size(2 * GIB, limit) == 2 * GIB
    with pytest.raises(SettingsError, match=r"SAMOVAR_KV_ARENA=3GiB .* 2.00 GiB of memory limit .* such as 1536MiB"):
        arena_size(3 * GIB, limit)


def test_an_arena_is_whole_units() -> None:
    assert arena_size(2 * 4096 + 4095, MemoryLimit(GIB, "x")) == 2 * 4096
    with pytest.raises(SettingsError, match="needs 4096 bytes or more"):
        arena_size(4095, MemoryLimit(GIB, "x"))


def test_nobody_can_resize_the_arena() -> None:
    arena = Arena(16 * 4096)
    try:
        for size in (0, 4096, 32 * 4096):
            with pytest.raises(PermissionError), open(arena.fd, "rb+", closefd=False) as file:
                file.truncate(size)
    finally:
        arena.close()
