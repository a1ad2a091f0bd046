"""services.cli.child and launch: processes that are read, stopped and never orphaned."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import child_log, launch
from services.cli.child import Child
from services.cli.log_line import LogLine
from tests.cli.standins import WAIT, alive, program, until

linux = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG and /proc are Linux's")


async def spawn(source: str, lines: list[LogLine] | None = None) -> Child:
    seen = [] if lines is None else lines
    return await Child.spawn("standin", program(source), dict(os.environ), seen.append)


async def test_reads_both_streams_to_the_end_and_tells_the_exit_code():
    lines: list[LogLine] = []
    process = await spawn("print('out', flush=True); print('err', file=sys.stderr); sys.exit(7)", lines)
    assert await process.wait() == 7
    assert [line.text for line in lines] == ["out", "err"]
    assert process.tail(1) == [lines[-1]]


async def test_log_with_no_line_breaks_bad_utf8_and_many_lines_stays_bounded():
    lines: list[LogLine] = []
    source = "w = sys.stdout.buffer.write; w(b'x' * 100_000); w(b'\\n\\xff\\n\\n'); w(b'line\\n' * 1000); w(b'rest')"
    process = await spawn(source, lines)
    assert await process.wait() == 0
    assert sum(line.text.count("x") for line in lines) == 100_000
    assert max(len(line.text) for line in lines) <= child_log.LINE_BYTES + 64 * 1024
    assert "\ufffd" in [line.text for line in lines]
    assert lines[-1].text == "rest"
    assert len(process.tail(10_000)) == child_log.KEPT_LINES


async def test_stop_lets_it_finish_on_sigterm(tmp_path: Path):
    process = await spawn(f"on_term(lambda: Path({str(tmp_path / 'bye')!r}).touch()); say('up')" + WAIT)
    await until(lambda: process.tail(1))
    assert await process.stop(10) == 0
    assert (tmp_path / "bye").exists()
    assert await process.stop(10) == 0  # again is harmless


async def test_stop_kills_what_ignores_sigterm():
    process = await spawn("signal.signal(signal.SIGTERM, signal.SIG_IGN); say('up')" + WAIT)
    await until(lambda: process.tail(1))
    assert await process.stop(0.1) == -signal.SIGKILL


@linux
async def test_stop_ends_grandchildren_and_does_not_wait_for_their_end_of_the_pipe():
    source = "import subprocess; p = subprocess.Popen(['sleep', '300']); say(p.pid)" + WAIT
    process = await spawn(source)
    await until(lambda: process.tail(1))
    grandchild = int(process.tail(1)[0].text.rsplit(" ", 1)[1])
    async with asyncio.timeout(10):
        await process.stop(300)
    await until(lambda: not alive(grandchild))


async def test_end_of_the_process_is_seen_while_a_grandchild_holds_the_pipe():
    process = await spawn("import subprocess; p = subprocess.Popen(['sleep', '300']); say(p.pid); sys.exit(5)")
    async with asyncio.timeout(10):
        assert await process.wait() == 5
    await process.stop(0)


async def test_runs_in_a_session_of_its_own():
    process = await spawn(WAIT)
    try:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
    finally:
        await process.stop(0)


async def test_a_program_that_is_not_there_is_a_process_that_fails():
    process = await Child.spawn("standin", ("/no/such/program",), dict(os.environ), lambda line: None)
    assert await process.wait() == 1
    assert "No such file" in process.tail(1)[0].text


@linux
async def test_dies_with_its_parent_even_when_that_is_killed():
    source = f"""
import asyncio, os, sys
from services.cli.child import Child
async def main():
    program = (sys.executable, "-c", {WAIT!r}.replace("while", "import signal\\nwhile"))
    child = await Child.spawn("c", program, dict(os.environ), lambda line: None)
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await until(lambda: not alive(pid))


@linux
def test_launcher_does_not_start_a_service_whose_parent_has_died():
    stranger = os.getppid()
    ended = subprocess.run(
        [sys.executable, "-IS", launch.__file__, str(stranger), "echo", "started"], capture_output=True
    )
    assert (ended.returncode, ended.stdout) == (1, b"")
