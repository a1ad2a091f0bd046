"""A real kvstore process, and a client that can say anything to it."""

import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

from services.protocol import codec, kv
from services.protocol.frames import FrameReader, frame

MIB = 2**20


def environ(path: Path, arena: str, **settings: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("SAMOVAR_", "OTEL_"))}
    return plain | {"SAMOVAR_KV_SOCKET": str(path), "SAMOVAR_KV_ARENA": arena} | settings


class StoreProcess:
    """`python -m services.kvstore`, ready when the constructor returns."""

    def __init__(self, path: Path, arena: str = "64MiB", **settings: str) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.kvstore"],
            env=environ(path, arena, **settings),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.log = ""
        for line in self.process.stderr:
            self.log += line
            if "ready: " in line:
                return
        raise AssertionError(f"the kvstore ended with {self.process.wait()}:\n{self.log}")

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Returns the exit code. Does nothing the second time."""
        if self.process.returncode is None:
            self.send(signum)
            _, rest = self.process.communicate(timeout=20)
            self.log += rest
        return self.process.wait()

    def kill(self) -> None:
        self.stop(signal.SIGKILL)


@contextmanager
def running(path: Path, arena: str = "64MiB", **settings: str) -> Generator[StoreProcess]:
    store = StoreProcess(path, arena, **settings)
    try:
        yield store
    finally:
        store.kill()


def refused(path: Path, arena: str = "64MiB", **settings: str) -> str:
    """The one line that a store prints which cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "services.kvstore"],
        env=environ(path, arena, **settings),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if " INFO " not in line]
    return line


class RawClient:
    """A blocking connection that says what it is told to, one call at a time."""

    def __init__(self, path: Path, fingerprint: str = "model", hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(str(path))
        self._numbers = count(1)
        self._frames = FrameReader()
        self._replies: list[kv.Reply] = []
        self.descriptors: list[int] = []
        if hello:
            self.welcome = self.call(kv.Hello, client="raw", fingerprint=fingerprint)
            assert isinstance(self.welcome, kv.Welcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, kind: type[kv.Call], **fields: Any) -> Any:
        number = next(self._numbers)
        self.socket.sendall(frame(kind(call=number, **fields)))
        reply = self.reply()
        assert reply.call == number
        return reply

    def reply(self) -> kv.Reply:
        """The next reply. Raises EOFError when the connection is closed instead."""
        while not self._replies:
            chunk, ancillary, _, _ = self.socket.recvmsg(2**20, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
            for _, _, data in ancillary:
                self.descriptors += array("i", data).tolist()
            if not chunk:
                raise EOFError
            self._replies += [codec.kv_reply.decode(payload) for payload in self._frames.feed(chunk)]
        return self._replies.pop(0)

    def reserve(self, *keys: bytes, length: int = 4096, parent: bytes = b"") -> kv.Reserved:
        """Of a chain of objects behind `parent`."""
        entries = []
        for key in keys:
            entries.append(kv.Entry(key=key, length=length, cost=1.0, parent=parent))
            parent = key
        return self.call(kv.Reserve, entries=tuple(entries))

    def put(self, *keys: bytes, length: int = 4096, parent: bytes = b"") -> kv.Reserved:
        reserved = self.reserve(*keys, length=length, parent=parent)
        self.call(kv.Commit, keys=keys)
        return reserved

    def states(self, *keys: bytes) -> tuple[kv.KeyState, ...]:
        return self.call(kv.Lookup, keys=keys).states

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
