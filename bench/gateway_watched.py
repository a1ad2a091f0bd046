"""The real gateway process, which also writes down how late its event loop ran.

Run as `python -m bench.gateway_watched RECORD`; settings as for `python -m services.gateway`. RECORD gets lines of
time.monotonic_ns() and nanoseconds: when a wake-up that was due every 2 ms came, and how late it was.
"""

import asyncio
import sys
import time
from pathlib import Path

from services.gateway import __main__ as gateway
from services.gateway.config import GatewayConfig

EVERY = 0.002
WRITTEN_FROM_NS = 1_000_000
"""Shorter delays are left out."""


def main(record: Path) -> int:
    serve = gateway.run

    async def run(config: GatewayConfig) -> None:
        with record.open("w", buffering=1) as lines:

            async def watch() -> None:
                while True:
                    due = time.monotonic_ns() + int(EVERY * 1e9)
                    await asyncio.sleep(EVERY)
                    late = time.monotonic_ns() - due
                    if late >= WRITTEN_FROM_NS:
                        lines.write(f"{due + late} {late}\n")

            watcher = asyncio.create_task(watch())
            try:
                await serve(config)
            finally:
                watcher.cancel()

    gateway.run = run
    return gateway.main()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
