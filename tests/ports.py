"""Ports for tests."""

import socket


def free_port() -> int:
    """A loopback TCP port that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
