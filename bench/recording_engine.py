"""The real engine process, which also writes down when its step loop delivered each token.

Run as `python -m bench.recording_engine RECORD`; settings as for `python -m services.engine`. RECORD gets a line for
each step, and is whole when the process has ended.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from services.engine import __main__ as engine
from services.engine.assembly import Assembly, Progress, assemble
from services.engine.config import EngineConfig
from services.engine.core import EngineCore
from services.engine.mailbox import StepResult

_Step = tuple[int, list[tuple[str, int, int]]]
"""time.monotonic_ns(), and of each delta the request's id, its offset and the number of its tokens."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Step).decode


def main(record: Path) -> int:
    with record.open("wb") as lines:

        def recording(config: EngineConfig, progress: Progress) -> Assembly:
            parts = assemble(config, progress)

            def core(deliver: Callable[[StepResult], None]) -> EngineCore:
                def note(result: StepResult) -> None:
                    now = time.monotonic_ns()
                    deliver(result)
                    if result.deltas:
                        deltas = [(delta.request_id, delta.offset, len(delta.tokens)) for _, delta in result.deltas]
                        lines.write(_encode((now, deltas)) + b"\n")

                return parts.core(note)

            return replace(parts, core=core)

        engine.assemble = recording
        return engine.main()


def steps(record: Path) -> Iterator[_Step]:
    """What a process that has ended wrote down."""
    with record.open("rb") as lines:
        yield from map(_decode, lines)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
