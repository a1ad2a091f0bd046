"""The real gateway process on one HTTP server or the other: `python -m bench.gateway_on uvicorn|granian`."""

import socket
import sys

from granian.constants import Interfaces
from granian.server.embed import Server
from litestar import Litestar

from services.gateway import __main__ as gateway


class GranianServer:
    """granian on our own loop, in the shape that the gateway wants (services.gateway.serve.HttpServer)."""

    def __init__(self, app: Litestar, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        listener.close()  # granian binds itself
        self._server = Server(app, address=host, port=port, interface=Interfaces.ASGI)

    async def run(self) -> None:
        await self._server.serve()

    def stop(self) -> None:
        self._server.stop()


if __name__ == "__main__":
    if sys.argv[1] == "granian":
        gateway.UvicornServer = GranianServer  # pyrefly: ignore[bad-assignment]
    sys.exit(gateway.main())
