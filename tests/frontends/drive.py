"""Runs one client on one task against a stack of its own."""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from tests.e2e import stack
from tests.frontends.client import Client, Setting
from tests.frontends.outcome import Outcome, books, session_problems, wire_problems
from tests.frontends.recorder import recording
from tests.frontends.task import Task, script

SCRIPTED_CONTEXT = 1_000_000
"""Tokens. The scripted engine's are bytes, and the clients' own prompts have up to 100,000 of them."""
TINY = Path(__file__).resolve().parents[2] / "models" / "samovar-tiny"
SECONDS = 300
OUTPUT = {"scripted": 8000, "tiny": 400}
"""Tokens of one answer: the small model may say the same thing for ever."""


def drive(client: Client, program: Path, home: Path, engine: str, sub_agent: bool = False) -> Outcome:
    """`home`: an empty folder for all files. `engine`: `scripted`, which does all of the task; or `tiny`, the small
    model, which reads the file if it is told the call word by word, and does no more. `sub_agent`: a scripted client
    that can has the file read by one."""
    scripted = engine == "scripted"
    options, settings = _scripted(client, home, sub_agent) if scripted else (("--model", str(TINY)), {})
    with (
        stack.running(home / "stack", *options, "--engines", "1", "--kv-size", "256MiB", **settings) as running,
        recording(running.url) as recorder,
    ):
        task = Task.lay_out(home / "work")
        user = home / "user"
        user.mkdir()
        context = httpx.get(f"{running.url}/v1/models", trust_env=False).json()["data"][0]["max_model_len"]
        at = Setting(recorder.url, running.model(), context, OUTPUT[engine], user, task.folder)
        launch = client.set_up(at, _prompt(client, task, scripted, sub_agent))
        began = time.monotonic()
        code, output = _run([str(program), *launch.arguments], user, task.folder, launch.environ)
        seconds = time.monotonic() - began
        exchanges = list(recorder.exchanges)
        sessions, turns = books(running.url, exchanges)
    problems = [] if code == 0 else [f"it ended with {code}:\n{output[-4000:]}"]
    problems += task.problems() if scripted else task.unread(exchange.body for exchange in exchanges)
    problems += wire_problems(client, exchanges) + session_problems(
        client, sessions, turns, agents=2 if sub_agent else 1
    )
    return Outcome(task, code, seconds, output, exchanges, sessions, turns, problems)


def _prompt(client: Client, task: Task, scripted: bool, sub_agent: bool) -> str:
    if not scripted:
        return task.spelled_out(client.read)
    return task.delegated if sub_agent else task.prompt


def _scripted(client: Client, home: Path, sub_agent: bool) -> tuple[Sequence[str], Mapping[str, str]]:
    """Options of `samovar up`, and settings."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / "script.jsonl"
    lines = script(client.read, client.write, client.titles, client.delegate if sub_agent else None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ("--model", f"scripted:{path}"), {"SAMOVAR_MAX_MODEL_LEN": str(SCRIPTED_CONTEXT)}


def _run(command: Sequence[str], user: Path, folder: Path, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit code, None after SECONDS, and what it printed. It sees none of the user's settings, keys or proxies."""
    known = {"PATH": os.environ["PATH"], "HOME": str(user), "TERM": "dumb", "NO_COLOR": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**known, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output
