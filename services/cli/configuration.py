"""Writes `docs/configuration.md` from the services' config classes: `python -m services.cli.configuration [FILE]`."""

import sys
from pathlib import Path

from msgspec import Struct

from services.cli.config import UpConfig
from services.engine.config import EngineConfig
from services.gateway.config import GatewayConfig
from services.kvstore.config import KvStoreConfig
from services.settings import table

PAGE = Path("docs/configuration.md")

_SECTIONS: tuple[tuple[str, type[Struct]], ...] = (
    ("samovar up", UpConfig),
    ("Gateway", GatewayConfig),
    ("Engine", EngineConfig),
    ("kvstore", KvStoreConfig),
)

_INTRODUCTION = """\
<!-- Written by `make docs` from the config classes in services/*/config.py. Do not edit. -->

# Configuration

Every service reads its settings from environment variables; an empty variable counts as not set. A value that cannot
be used stops the service with a line that names the variable and says what to write instead.

A size is a number of bytes like `4GiB` (or `4Gi`, `4G`), `512MiB`, `2GB` (decimal) or `1048576`. A list is separated by
commas. `samovar up` passes its environment on to the services that it starts; some settings are its options too
(`samovar up --help`).

Tracing follows OpenTelemetry's own variables: it is off until `OTEL_EXPORTER_OTLP_ENDPOINT` or
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return _INTRODUCTION + "".join(_section(title, config) for title, config in _SECTIONS)


def _section(title: str, config: type[Struct]) -> str:
    lines = ["", f"## {title}", "", "| Variable | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for name, kind, default, text in table(config):
        lines.append(f"| `{name}` | {_cell(kind)} | {f'`{_cell(default)}`' if default else ''} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
