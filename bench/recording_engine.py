"""The real engine process, which also writes down when its step loop delivered each token.

Run as `python -m bench.recording_engine RECORD`; settings as for `python -m services.engine`. At its end RECORD holds
JSON lines [request id, offset, count, time.monotonic_ns()].
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from services.engine import __main__ as engine
from services.engine.assembly import Assembly, Progress, assemble
from services.engine.config import EngineConfig
from services.engine.core import EngineCore
from services.engine.mailbox import StepResult


def main(record: Path) -> int:
    delivered: list[tuple[StepResult, int]] = []

    def recording(config: EngineConfig, progress: Progress) -> Assembly:
        parts = assemble(config, progress)

        def core(deliver: Callable[[StepResult], None]) -> EngineCore:
            def note(result: StepResult) -> None:
                delivered.append((result, time.monotonic_ns()))
                deliver(result)

            return parts.core(note)

        return replace(parts, core=core)

    engine.assemble = recording
    code = engine.main()
    with record.open("w") as lines:
        for result, now in delivered:
            for _, delta in result.deltas:
                lines.write(json.dumps([delta.request_id, delta.offset, len(delta.tokens), now]) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
