"""`samovar up`: the whole stack on this machine, until Ctrl-C."""

import asyncio
import json
import logging
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Mapping

from services.cli import readiness
from services.cli.console import Console, lossy
from services.cli.keeper import StartFailed
from services.cli.release import release
from services.cli.runtime import Runtime
from services.cli.stack import Services, Stack
from services.cli.supervisor import Supervisor
from services.settings import SettingsError, variable

BAD_SETTINGS = 2
"""Exit code when nothing was started since a setting cannot be used."""


def run(options: Mapping[str, str]) -> int:
    """Returns the exit code. `options`: SAMOVAR_* variables from the command line; they win over the environment."""
    # What it says of an outage is said better here: which service died, and when it is back.
    logging.getLogger("services.bus").disabled = True
    try:
        stack = Stack.load({**os.environ, **options})
    except SettingsError as error:
        print(f"samovar: {error}", file=sys.stderr)
        return BAD_SETTINGS
    console = Console(stack.up.verbose)
    for warning in stack.warnings(os.environ):
        console.say(f"warning: {warning}")
    try:
        runtime = Runtime.make()
    except OSError as error:
        console.say(f"no folder for this run: {error}")
        return 1
    try:
        return asyncio.run(_serve(stack, runtime, console))
    except OSError as error:
        console.say(f"{error} ({variable('data_dir')} names the folder of the session database)")
        return BAD_SETTINGS
    finally:
        runtime.remove()


async def _serve(stack: Stack, runtime: Runtime, console: Console) -> int:
    """From the first process to the last. Raises OSError before anything is started."""
    services = Services(stack, runtime, password=secrets.token_hex(16))
    phases = services.phases()
    processes: dict[str, dict[str, int | None]] = {
        service.name: {"pid": None, "metrics_port": service.metrics_port or None}
        for phase in phases
        for service in phase
    }
    runtime.note(pid=os.getpid(), url=services.url, nats_url=services.nats_url, children=processes)

    def changed(service: str, pid: int | None) -> None:
        processes[service]["pid"] = pid
        runtime.note(children=processes)

    supervisor = Supervisor(phases, start_timeout=stack.up.start_timeout, watcher=console, changed=changed)
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if not stop.is_set():
            stop.set()
            console.say(
                f"{number.name}: stopping; open streams get up to {stack.up.drain_timeout:g} s "
                "(once more ends them at once)"
            )
        elif number is not signal.SIGHUP:  # which a closing terminal sends more than once
            console.say(f"{number.name} again: ending everything now")
            supervisor.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            loop.add_signal_handler(number, on_signal, number)

    console.open()
    start = asyncio.create_task(_start(supervisor, services, stack.up.start_timeout))
    stopped = asyncio.create_task(stop.wait())
    code = 0
    try:
        await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            console.started()
            card = services.engines.card()
            _announce(services.url, card.name if card else stack.engine.model_name, bool(stack.gateway.api_keys))
            runtime.note(ready=True)
            await stopped
    except StartFailed as failure:
        console.started()
        console.failed(failure)
        code = failure.exit_code
    finally:
        console.started()
        start.cancel()
        await asyncio.wait({start})
        await services.engines.close()
        await supervisor.drain()
        stopped.cancel()
    return code


async def _start(supervisor: Supervisor, services: Services, timeout: float) -> None:
    """Returns when the gateway answers for an engine. Raises StartFailed."""
    await supervisor.start()
    try:
        await readiness.serving(services.host, services.port, timeout)
    except TimeoutError as error:
        raise StartFailed(str(error)) from None


def _announce(url: str, model: str, with_key: bool) -> None:
    """The result of the command, on stdout."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": model, "messages": question, "max_tokens": 64, "temperature": 0}
    key = " -H 'authorization: Bearer YOUR_KEY'" if with_key else ""
    print(
        f"\nSamovar {release()} serves {model} at {url}/v1\n\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json'{key} \\\n"
        f"    -d {shlex.quote(json.dumps(body))}\n\n"
        "Ctrl-C stops it.",
        file=lossy(sys.stdout),
        flush=True,
    )
