"""The tokens of each request, kept until some time after its end, for gateways that lost a message.

Also the memory of which requests were seen: one that is sent again is not run again. On the event loop's thread.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from services.protocol.generate import FinishReason, TokenDelta, Usage

FINISHED_TOKENS_MAX = 4_000_000
"""Of finished requests, all together (16 MB): beyond it the oldest go before their time."""
FINISHED_MAX = 10_000
DELTA_TOKENS = 65_536
"""Of one answer: 5 bytes a token at most, so it fits NATS's default message. The gateway asks for the rest."""


@dataclass(slots=True, eq=False)
class Entry:
    gateway_id: str
    tokens: "array[int]"
    cached: int | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str = ""
    finished_at: float = 0.0


class ReplayBuffer:
    def __init__(self, ttl: float) -> None:
        """`ttl`: seconds that a finished request is kept."""
        self._ttl = ttl
        self._open: dict[str, Entry] = {}
        self._finished: OrderedDict[str, Entry] = OrderedDict()
        self._finished_tokens = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open or request_id in self._finished

    @property
    def open(self) -> list[str]:
        """Requests that have not finished."""
        return list(self._open)

    @property
    def open_count(self) -> int:
        return len(self._open)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def open_of(self, gateway_id: str) -> list[str]:
        return [name for name, entry in self._open.items() if entry.gateway_id == gateway_id]

    def begin(self, request_id: str, gateway_id: str, generated: Sequence[int]) -> None:
        """A request was accepted; `generated` are the tokens that came with it."""
        self._open[request_id] = Entry(gateway_id, array("I", generated))

    def add(self, delta: TokenDelta, now: float) -> None:
        """What the core said. A delta that overlaps (or follows the end) adds only what is new."""
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        if delta.offset > len(entry.tokens):
            raise ValueError(f"the core skipped tokens of {delta.request_id}: {len(entry.tokens)} -> {delta.offset}")
        entry.tokens.extend(delta.tokens[len(entry.tokens) - delta.offset :])
        if delta.cached is not None:
            entry.cached = delta.cached
        if delta.finish is not None:
            entry.finish, entry.usage, entry.error = delta.finish, delta.usage, delta.error
            entry.finished_at = now
            del self._open[delta.request_id]
            self._finished[delta.request_id] = entry
            self._finished_tokens += len(entry.tokens)
            self.expire(now)

    def read(self, request_id: str, offset: int) -> TokenDelta | None:
        """Tokens from `offset` on, DELTA_TOKENS at most, with the finish where it is reached. None: not known."""
        entry = self._open.get(request_id) or self._finished.get(request_id)
        if entry is None or offset < 0:
            return None
        end = offset + DELTA_TOKENS
        tokens = tuple(entry.tokens[offset:end])
        if end < len(entry.tokens):
            return TokenDelta(request_id, offset, tokens, cached=entry.cached)
        return TokenDelta(request_id, offset, tokens, entry.finish, entry.usage, entry.error, entry.cached)

    def expire(self, now: float) -> None:
        while self._finished:
            name, entry = next(iter(self._finished.items()))
            if (
                now - entry.finished_at < self._ttl
                and self._finished_tokens <= FINISHED_TOKENS_MAX
                and len(self._finished) <= FINISHED_MAX
            ):
                return
            del self._finished[name]
            self._finished_tokens -= len(entry.tokens)
