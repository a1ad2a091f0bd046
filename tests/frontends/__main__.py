"""`python -m tests.frontends [NAME...]`: real agent clients from npm against the real stack, headless.

Each reads a file and writes another one by what it has read. Needs npm; the clients (1.2 GB, all four) are installed
into --cache, or else into a temporary folder. docs/frontends.md tells what came of it.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.frontends.claude_code import CLAUDE_CODE
from tests.frontends.client import Client
from tests.frontends.codex import CODEX
from tests.frontends.drive import drive
from tests.frontends.install import NotInstalled, installed
from tests.frontends.opencode import OPENCODE
from tests.frontends.outcome import Outcome
from tests.frontends.qwen_code import QWEN_CODE
from tests.frontends.recorded import write

CLIENTS = {client.name: client for client in (QWEN_CODE, OPENCODE, CODEX, CLAUDE_CODE)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frontends", description="Real agent clients, headless.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"clients: {', '.join(CLIENTS)}; all of them if none")
    parser.add_argument("--cache", type=Path, help="folder for the npm packages, kept; default: a temporary one")
    parser.add_argument("--engine", choices=("scripted", "tiny"), default="scripted", help="what answers")
    parser.add_argument("--record", type=Path, help="folder to write what the clients sent to, for the gateway's tests")
    parser.add_argument("--sub-agent", action="store_true", help="let a sub-agent read the file, where there are any")
    options = parser.parse_args()
    # A shell has what it runs in the background ignore SIGINT, and so would the stack, which is stopped by one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unknown = [name for name in options.names if name not in CLIENTS]
    if unknown:
        parser.error(f"no such client: {', '.join(unknown)}")
    names = options.names or [name for name in CLIENTS if CLIENTS[name].delegate or not options.sub_agent]
    failed = []
    with tempfile.TemporaryDirectory(prefix="frontends-") as folder:
        for name in names:
            client = CLIENTS[name]
            try:
                program = installed(client, options.cache or Path(folder) / "npm")
            except NotInstalled as error:
                print(f"{name}: {error}")
                failed.append(name)
                continue
            outcome = drive(client, program, Path(folder) / name, options.engine, options.sub_agent)
            _print(client, outcome)
            if outcome.problems:
                failed.append(name)
            elif options.record and options.engine == "scripted" and not options.sub_agent:
                print(f"  written to {write(client, outcome.exchanges, outcome.task, options.record)}")
    return 1 if failed else 0


def _print(client: Client, outcome: Outcome) -> None:
    verdict = "FAILED" if outcome.problems else "ok"
    print(f"{client.name} {client.version}: {verdict}, {len(outcome.exchanges)} requests in {outcome.seconds:.1f} s")
    print(f"  {len(outcome.sessions)} sessions, named by {client.session}; turns of the main one:")
    for turn in outcome.turns:
        print(f"  prompt {turn.prompt:6} tokens, of them cached {turn.cached:6}; output {turn.output:4}")
    for problem in outcome.problems:
        print(f"  {problem}")


if __name__ == "__main__":
    sys.exit(main())
