"""Settings of `samovar up` itself; those of the services it starts stand in their own config."""

import os
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from services.settings import DrainTimeout, describe


class UpConfig(Struct, frozen=True, kw_only=True):
    engines: Annotated[int, describe("Engines to start.", ge=1, le=64)] = 1
    kvstore: Annotated[bool, describe("Keep offloaded cache blocks in host memory.")] = True
    nats_port: Annotated[
        int, describe("Loopback port of the NATS server that `samovar up` starts; 0 takes a free one.", ge=0, le=65535)
    ] = 0
    data_dir: Annotated[
        str, describe("Folder of the session database; empty is `$XDG_STATE_HOME/samovar` (`~/.local/state/samovar`).")
    ] = ""
    start_timeout: Annotated[
        float, describe("Seconds that a starting service may show no progress before `samovar up` gives up.", gt=0)
    ] = 120.0
    drain_timeout: DrainTimeout = 30.0
    verbose: Annotated[bool, describe("Show all log lines of the services, not only warnings.")] = False

    def data_folder(self) -> Path:
        """Where the session database goes. Not created here."""
        if self.data_dir:
            return Path(self.data_dir).expanduser()
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(state).expanduser() / "samovar"
