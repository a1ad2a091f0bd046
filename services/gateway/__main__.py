"""`python -m services.gateway`: one gateway process, all set by `SAMOVAR_*`."""

import gc
import sys
import uuid

import msgspec
import uvloop

from services import settings, telemetry
from services.bus import Bus
from services.gateway.app import Deps, create_app
from services.gateway.config import GatewayConfig
from services.gateway.engine_client import EngineClient
from services.gateway.serve import PortInUse, UvicornServer, listen, serve, url
from services.gateway.sessions import ResponseBounds, RowBounds, SessionStore

SWITCH_SECONDS = 0.001

UNUSABLE = 2
"""Exit status for settings that cannot be used: trying again would not help."""


async def run(config: GatewayConfig) -> None:
    """Serve until a signal. Raises SettingsError and PortInUse before anything has started."""
    bus = Bus(config.nats_url, f"gateway {config.gateway_id}")
    listener = listen(config.host, config.port)
    deps = Deps(
        config=config,
        engines=EngineClient(bus, config.gateway_id, config.resume_timeout),
        sessions=SessionStore(
            config.database,
            config.session_rows,
            responses=ResponseBounds(config.response_rows, config.response_bytes),
            calls=RowBounds(config.call_rows, config.call_bytes),
            answers=RowBounds(config.answer_rows, config.answer_bytes),
        ),
    )
    # What is there by now stays: a full collection looks at it no more, which would stop all streams for 70 ms.
    gc.collect()
    gc.freeze()
    # In one line that a supervisor can wait for; the port may have been chosen by the system.
    print(f"samovar gateway {config.gateway_id} serves on {url(listener)}", file=sys.stderr, flush=True)
    await serve(UvicornServer(create_app(deps), listener), deps.open_answers, config.drain_timeout)


def main() -> int:
    try:
        config = settings.load(GatewayConfig)
        config = msgspec.structs.replace(config, gateway_id=config.gateway_id or f"gateway-{uuid.uuid4().hex[:8]}")
        telemetry.start("gateway", config.gateway_id, config.log_level)
        # Threads render and hash long prompts; the event loop gets the interpreter back from them after this at most.
        # Beside one that hashes without end it woke 9 ms late in the median, with Python's own 5 ms 13 to 22 ms (two
        # busy cores).
        sys.setswitchinterval(SWITCH_SECONDS)
        uvloop.run(run(config))
    except (settings.SettingsError, PortInUse) as error:
        print(f"samovar gateway: {error}", file=sys.stderr)
        return UNUSABLE
    finally:
        telemetry.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
