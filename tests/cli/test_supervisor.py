"""services.cli.supervisor and keeper, with stand-in programs for the services."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from services.cli import keeper
from services.cli.keeper import StartFailed
from services.cli.service import Probe, Report, Service
from services.cli.supervisor import Supervisor
from tests.cli.standins import WAIT, Watched, alive, service, until


class Bench:
    """A supervisor over stand-ins, whose journal tells in which order things happened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.journal.touch()
        self.watched = Watched()
        self.pids: dict[str, int | None] = {}
        self.started: list[int] = []

    def standin(self, name: str, before: str = "", after: str = "", grace: float = 10.0) -> Service:
        """Runs `before`, is ready, runs `after`, waits; writes its start and its end to the journal."""
        note = f"(lambda text: open({str(self.journal)!r}, 'a').write(text + '\\n'))"
        source = (
            f"on_term(lambda: {note}('-{name}'))\n{before}\n{note}('+{name}')\n{self._touch(name)}\n{after}\n{WAIT}"
        )
        return service(name, source, self.ready(name), grace)

    def _touch(self, name: str) -> str:
        return f"Path({str(self.folder)!r}, f'{name}.{{os.getpid()}}').touch()"

    def ready(self, name: str) -> Probe:
        async def probe(report: Report) -> None:
            await until(lambda: (self.folder / f"{name}.{self.pids[name]}").exists())

        return probe

    def supervisor(self, *phases: list[Service], start_timeout: float = 20.0) -> Supervisor:
        return Supervisor(phases, start_timeout=start_timeout, watcher=self.watched, changed=self._changed)

    def _changed(self, name: str, pid: int | None) -> None:
        self.pids[name] = pid
        if pid is not None:
            self.started.append(pid)

    def events(self) -> list[str]:
        return self.journal.read_text().split()

    def pid(self, name: str) -> int:
        pid = self.pids[name]
        assert pid is not None
        return pid


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keeper, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(keeper, "LONGEST_DELAY_SECONDS", 0.04)
    bench = Bench(tmp_path)
    yield bench
    assert [pid for pid in bench.started if alive(pid)] == []


async def test_starts_phase_by_phase_and_stops_in_reverse(bench: Bench):
    supervisor = bench.supervisor([bench.standin("nats")], [bench.standin("engine")], [bench.standin("gateway")])
    await supervisor.start()
    await supervisor.drain()
    assert bench.events() == ["+nats", "+engine", "+gateway", "-gateway", "-engine", "-nats"]
    assert bench.watched.readied == ["nats", "engine", "gateway"]
    assert bench.watched.said == []


async def test_restarts_what_dies_with_growing_delays(bench: Bench):
    # The second to fifth process die before they are ready, the sixth stays.
    count = bench.folder / "count"
    count.write_text("")
    dying = (
        f"p = Path({str(count)!r}); p.write_text(p.read_text() + 'x')\n"
        "if 2 <= len(p.read_text()) <= 5: sys.exit('bad luck')"
    )
    supervisor = bench.supervisor([bench.standin("engine", before=dying)])
    await supervisor.start()
    os.kill(bench.pid("engine"), signal.SIGKILL)
    await until(lambda: any("is back" in text for text in bench.watched.said))
    await supervisor.drain()
    assert bench.watched.said[:5] == [
        "engine was killed by SIGKILL; starting it again in 0.01 s",
        "engine ended with exit code 1 before it was ready (bad luck); starting it again in 0.02 s",
        "engine ended with exit code 1 before it was ready (bad luck); starting it again in 0.04 s",
        "engine ended with exit code 1 before it was ready (bad luck); starting it again in 0.04 s",
        "engine ended with exit code 1 before it was ready (bad luck); starting it again in 0.04 s",
    ]
    assert len(bench.watched.said) == 6


async def test_delay_starts_over_once_it_was_healthy(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keeper, "HEALTHY_SECONDS", 0.0)
    supervisor = bench.supervisor([bench.standin("engine")])
    await supervisor.start()
    for times in (1, 2, 3):
        os.kill(bench.pid("engine"), signal.SIGTERM)
        await until(lambda n=times: sum("is back" in text for text in bench.watched.said) == n)
    await supervisor.drain()
    deaths = [text for text in bench.watched.said if "is back" not in text]
    assert deaths == ["engine ended with exit code 0; starting it again in 0.01 s"] * 3


async def test_unusable_settings_end_the_start_with_the_services_own_message(bench: Bench):
    bad = service(
        "engine", "print('samovar engine: no such model', file=sys.stderr); sys.exit(2)", bench.ready("engine")
    )
    slow = service("gateway", "say('importing')" + WAIT, bench.ready("gateway"))
    supervisor = bench.supervisor([bench.standin("nats")], [bad, slow])
    with pytest.raises(StartFailed, match="engine ended with exit code 2 before it was ready") as failure:
        await supervisor.start()
    assert failure.value.exit_code == 2
    assert [line.text for line in failure.value.tail] == ["samovar engine: no such model"]
    await supervisor.drain()
    assert bench.events() == ["+nats", "-nats"]


async def test_crash_at_first_start_is_not_repeated(bench: Bench):
    supervisor = bench.supervisor([service("engine", "raise OSError('broken')", bench.ready("engine"))])
    with pytest.raises(StartFailed) as failure:
        await supervisor.start()
    assert failure.value.exit_code == 1
    assert failure.value.tail[-1].text == "OSError: broken"
    await supervisor.drain()
    assert len(bench.started) == 1


async def test_start_without_progress_is_given_up(bench: Bench):
    async def probe(report: Report) -> None:
        while True:
            report(0.5, "reading weights")
            await asyncio.sleep(0.01)

    supervisor = bench.supervisor([service("engine", "say('hm')" + WAIT, probe)], start_timeout=0.5)
    with pytest.raises(StartFailed, match=r"showed no progress for 0\.5 s \(last: reading weights\)") as failure:
        await supervisor.start()
    assert failure.value.exit_code == 1
    assert not alive(bench.started[0])
    await supervisor.drain()


async def test_slow_start_that_makes_progress_is_not(bench: Bench):
    async def probe(report: Report) -> None:
        for step in range(8):
            report(step / 8, "loading")
            await asyncio.sleep(0.2)

    supervisor = bench.supervisor([service("engine", WAIT, probe)], start_timeout=1.2)
    await supervisor.start()
    await supervisor.drain()
    assert [fraction for _, fraction, _ in bench.watched.progress] == [None, *(step / 8 for step in range(8))]


async def test_start_can_be_broken_off(bench: Bench):
    supervisor = bench.supervisor([bench.standin("nats")], [service("engine", WAIT, bench.ready("engine"))])
    start = asyncio.create_task(supervisor.start())
    await until(lambda: "engine" in bench.pids)
    start.cancel()
    await asyncio.wait({start})
    await supervisor.drain()
    assert bench.events() == ["+nats", "-nats"]


async def test_engine_is_restarted_while_the_gateway_drains(bench: Bench):
    go = bench.folder / "go"
    finishing = f"\non_term(lambda: [time.sleep(0.01) for _ in iter(lambda: Path({str(go)!r}).exists(), True)])"
    supervisor = bench.supervisor([bench.standin("engine")], [bench.standin("gateway", after=finishing)])
    await supervisor.start()
    drain = asyncio.create_task(supervisor.drain())
    first = bench.pid("engine")
    os.kill(first, signal.SIGKILL)
    await until(lambda: any("is back" in text for text in bench.watched.said))
    assert bench.pid("engine") != first
    go.touch()
    await drain


async def test_kill_ends_a_drain_that_hangs(bench: Bench):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    supervisor = bench.supervisor([bench.standin("engine")], [bench.standin("gateway", after=deaf, grace=300)])
    await supervisor.start()
    drain = asyncio.create_task(supervisor.drain())
    await asyncio.sleep(0)
    assert not drain.done()
    supervisor.kill()
    async with asyncio.timeout(10):
        await drain
    assert bench.watched.said == []


async def test_process_ids_are_told(bench: Bench):
    supervisor = bench.supervisor([bench.standin("engine")])
    await supervisor.start()
    first = bench.pid("engine")
    os.kill(first, signal.SIGKILL)
    await until(lambda: bench.pids["engine"] is None)
    await until(lambda: any("is back" in text for text in bench.watched.said))
    assert bench.pid("engine") not in (None, first)
    await supervisor.drain()


async def test_program_that_cannot_be_spawned(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    supervisor = bench.supervisor([bench.standin("engine")])
    with pytest.raises(StartFailed, match=r"engine could not be started: .*No such file") as failure:
        await supervisor.start()
    assert failure.value.exit_code == 1
    await supervisor.drain()
