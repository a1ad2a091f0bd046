"""services.cli.console: what is shown, when, and to whom."""

import logging
import os
import pty
from pathlib import Path

import pytest

from services.cli import console as console_module
from services.cli.console import Console
from services.cli.keeper import StartFailed
from services.cli.log_line import LogLine


@pytest.fixture
def screen(tmp_path: Path):
    with (tmp_path / "screen").open("w+") as stream:
        yield stream


def info(text: str) -> LogLine:
    return LogLine("engine-0", text, logging.INFO)


def warning(text: str) -> LogLine:
    return LogLine("engine-0", text, logging.WARNING)


def shown(stream) -> list[str]:
    return Path(stream.name).read_text().splitlines()


def read(terminal: int) -> str:
    """What was written to a pseudo-terminal, `""` at the end (Linux raises EIO there)."""
    try:
        return os.read(terminal, 4096).decode()
    except OSError:
        return ""


def test_only_warnings_are_shown_unless_verbose(screen):
    console = Console(verbose=False, stream=screen)
    console.log(info("fine"))
    console.log(warning("x" * 300 + " [bold]not markup[/bold] :smile:"))
    assert shown(screen) == ["[engine-0] " + "x" * 300 + " [bold]not markup[/bold] :smile:"]
    Console(verbose=True, stream=screen).log(info("fine"))
    assert shown(screen)[1:] == ["[engine-0] fine"]


def test_warnings_of_a_start_wait_for_its_end(screen):
    console = Console(verbose=False, stream=screen)
    console.open()
    console.starting("engine-0", None, "starting")
    console.log(warning("slow disk"))
    assert shown(screen) == []
    console.ready("engine-0", 1.25)
    console.log(warning("hot"))
    assert shown(screen) == ["samovar: engine-0 is ready after 1.2 s", "[engine-0] slow disk", "[engine-0] hot"]


def test_failed_start_shows_the_end_of_the_log_once(screen):
    failure = StartFailed("engine-0 ended with exit code 2", [info("reading"), warning("no such file")], 2)
    console = Console(verbose=False, stream=screen)
    console.starting("engine-0", None, "starting")
    for line in failure.tail:
        console.log(line)
    console.started()
    console.failed(failure)
    assert shown(screen) == [
        "samovar: engine-0 ended with exit code 2",
        "[engine-0] reading",
        "[engine-0] no such file",
    ]


def test_progress_without_a_terminal_is_a_line_now_and_then(screen, monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    console = Console(verbose=False, stream=screen)
    console.open()
    for percent in range(0, 100, 10):
        console.starting("engine-0", percent / 100, f"layer {percent}")
        clock[0] += console_module.PLAIN_SECONDS / 2 + 0.01
    console.started()
    console.starting("engine-0", 0.5, "again")  # of a restart: `say` tells of those
    assert shown(screen) == [f"samovar: engine-0 {percent}% layer {percent}" for percent in range(0, 100, 20)]


def test_terminal_gets_a_bar_and_lines_stand_above_it():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        console = Console(verbose=False, stream=terminal)
        console.open()
        console.starting("engine-0", 0.5, "layer [15] of 30")
        console.say("hello")
        console.ready("engine-0", 2.0)
        console.started()
    text = "".join(iter(lambda: read(ours), ""))
    os.close(ours)
    assert "samovar: hello" in text
    assert "ready after 2.0 s" in text
    assert "━" in text


def test_closed_terminal_never_raises():
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream:
        console = Console(verbose=True, stream=stream)
        console.open()
        console.say("nobody reads this")
        console.log(info("nor this"))
        console.started()
