"""Requests that are sent again while they still run: a client's timer ran out, or a proxy tried twice.

The answer under way is handed to the newcomer from its first token on, so the engine works once. A request counts as
sent again when method, body, key and session marks are the same to the byte, and the client says so (`Idempotency-Key`,
or the retry count that the SDKs of OpenAI and Anthropic send), or names its session by an agent's own header: agents
never ask the same thing twice at once. Anyone else who does may want two samples, and gets them.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from services.gateway.output.answer import Answer

_RETRIES = "x-stainless-retry-count"
_IDEMPOTENCY = "idempotency-key"
_AGENT_MARKS = ("x-claude-code-session-id", "thread-id", "x-session-affinity")
_SAME = (
    "authorization",
    "x-api-key",
    _IDEMPOTENCY,
    *_AGENT_MARKS,
    "x-claude-code-agent-id",
    "session-id",
    "x-session-id",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two requests the same."""

    digest: bytes
    may_join: bool
    """An earlier one that still runs may be taken over."""


def identity(route: str, headers: Mapping[str, str], body: bytes) -> Identity:
    """`headers` are looked up by lower-case names. About 1 ms for a megabyte."""
    digest = hashlib.blake2b(digest_size=16, person=b"samovar-resend")
    for part in (route, *(headers.get(name, "") for name in _SAME)):
        data = part.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(4, "little") + data)
    digest.update(body)
    said = headers.get(_RETRIES, "0") not in ("", "0") or bool(headers.get(_IDEMPOTENCY))
    return Identity(digest.digest(), said or any(headers.get(name) for name in _AGENT_MARKS))


class Running:
    """The newest answer of each identity, as long as anybody holds it. On the event loop's thread."""

    def __init__(self) -> None:
        self._answers: WeakValueDictionary[bytes, Answer] = WeakValueDictionary()

    def add(self, identity: Identity, answer: Answer) -> None:
        self._answers[identity.digest] = answer

    def joinable(self, identity: Identity, prompt: bytes) -> Answer | None:
        """An answer under way to the same request; `prompt`: packed ids, which must be the same as well, since a
        template may print the time."""
        answer = self._answers.get(identity.digest) if identity.may_join else None
        return answer if answer is not None and answer.running and answer.prompt == prompt else None
