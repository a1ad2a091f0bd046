"""One line that a service wrote, and how serious it is."""

import logging
import re
from dataclasses import dataclass

_LEVELS = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "DBG": logging.DEBUG,
    "TRC": logging.DEBUG,
    "INF": logging.INFO,
    "WRN": logging.WARNING,
    "ERR": logging.ERROR,
    "FTL": logging.CRITICAL,
}
_MARK = re.compile(r"^\S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) |\[(DBG|TRC|INF|WRN|ERR|FTL)\] ")
# The password that NATS means is made for one run and lies in a folder that only its user can read.
_NOISE = re.compile(r"\[WRN\] Plaintext passwords detected")


@dataclass(frozen=True, slots=True)
class LogLine:
    service: str
    text: str
    """Without the line break."""
    level: int
    """As in `logging`."""


def read(service: str, text: str, before: LogLine | None) -> LogLine:
    """Find the level in our format (`services.telemetry`) or in that of NATS.

    A line without a level belongs to the line before it (`before`: the last one of the same process); a traceback that
    nothing announced is an error.
    """
    found = _MARK.search(text)
    if found:
        level = logging.INFO if _NOISE.search(text) else _LEVELS[found.group(1) or found.group(2)]
    elif text.startswith("Traceback "):
        level = logging.ERROR
    else:
        level = before.level if before is not None else logging.INFO
    return LogLine(service, text, level)
