"""What the gateway tells the session store about a request, and what the store tells a reader."""

from typing import Literal

from msgspec import Struct

from services.gateway.miss import Miss
from services.protocol.generate import Usage

SessionSource = Literal["session_id", "header", "prompt_cache_key", "metadata", "user", "lineage"]
"""Who named a session: the request's field or header of that name, or the store itself by the prompt's lineage."""


class SessionHint(Struct, frozen=True, kw_only=True):
    """All that a request says about the conversation that it belongs to. Empty = not said."""

    opening: bytes = b""
    """`lineage.opening_digest` of all messages up to the first user message, tools included. Block hashes alone
    cannot tell two agents apart that share a system prompt and whose first user messages are shorter than a block:
    see `Lineage`. Empty where there are no messages (a raw prompt)."""
    session_id: str = ""
    """The body's `session_id`."""
    header: str = ""
    """The session that the client's headers name, by `x-session-id` or a mark of its own."""
    parent: str = ""
    """The session that started the one of `header`."""
    agent: bool = False
    """`header` is a mark that only agents send, whose requests have tools."""
    prompt_cache_key: str = ""
    metadata_user: str = ""
    """The session within `metadata.user_id`."""
    user: str = ""


class RequestRecord(Struct, frozen=True, kw_only=True):
    """One request, when it is over (answered, cancelled, refused or failed)."""

    request_id: str
    """Unique: a second record of the same id is not written."""
    session_id: str
    """As `SessionStore.resolve` gave it; empty for a request that was refused before it had one."""
    model: str
    arrived: float
    """Unix seconds."""
    status: int
    """HTTP status."""
    engine_id: str = ""
    usage: Usage | None = None
    """None when no engine took the request: then it is no turn of its session."""
    finish_reason: str = ""
    error: str = ""
    missed: Miss | None = None


class ResponseRecord(Struct, frozen=True, kw_only=True):
    """One response of the Responses API, as it is stored for later requests. Both texts are JSON."""

    id: str
    chain: str
    """The id of the first response of its chain, which may be its own."""
    previous: str | None
    """The response that it goes on from."""
    created: float
    """Unix seconds."""
    response: bytes
    """The response object."""
    items: bytes
    """The input items of its own request, without those of `previous`."""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items)


class ForgottenResponse(Struct, frozen=True):
    """A response that its client has deleted."""

    id: str


class CallRecord(Struct, frozen=True):
    """A tool call as the model wrote it, for the prompts in which it comes back."""

    id: str
    language: str
    """The `ModelCard.tokenizer_digest` of its model: to another one these words may mean nothing."""
    name: str
    arguments: str
    """What was read out of `raw`: a JSON object."""
    raw: str
    """From `<tool_call>` to `</tool_call>`."""

    @property
    def size(self) -> int:
        """Bytes, of what may be large."""
        return len(self.arguments.encode()) + len(self.raw.encode())


class AnswerRecord(Struct, frozen=True, kw_only=True):
    """An answer as the model wrote it, for the prompts in which it comes back as a message of the history."""

    id: str
    """Of its request."""
    place: bytes
    """`answer_memory.places` of the conversation that it answers."""
    calls: tuple[str, ...] = ()
    """Ids of its complete tool calls, in order."""
    language: str
    """The tokenizer digest and the vocabulary's size of its model: to another one these ids mean nothing."""
    lead: str
    """What the prompt ended with, from the token that opens the answer's turn on."""
    thinking: bool
    """The prompt ended within the thoughts."""
    whole: bool
    """The model ended it itself, and nothing of it was kept from the client."""
    thoughts: bytes
    """`written_answer.thoughts_digest` of the thoughts that the client was given."""
    content: bytes
    """`written_answer.content_digest` of its content."""
    ids: bytes
    """Packed token ids, without the one that ended the turn."""

    @property
    def size(self) -> int:
        """Bytes, of what may be large."""
        return len(self.ids)


class SessionSummary(Struct, frozen=True, kw_only=True):
    """One session of `GET /api/sessions`. Token counts are sums over its turns."""

    id: str
    parent: str | None
    """The session that this one forked from."""
    source: str
    """A SessionSource."""
    first_seen: float
    """Unix seconds: arrival of its first request."""
    last_seen: float
    """Unix seconds: arrival of its newest request."""
    turns: int
    """Requests that an engine took."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed again."""


class RequestSummary(Struct, frozen=True, kw_only=True):
    """One request of `GET /api/sessions/{id}`; the fields are those of RequestRecord and Usage."""

    id: str
    session_id: str | None
    model: str
    engine: str
    arrived: float
    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_device: int
    cached_host: int
    """Out of the kvstore's memory or its disk."""
    cached_disk: int
    """Those of `cached_host` that were on disk only."""
    computed_tokens: int
    missed: Miss | None
    """Why what was computed was not found."""
    finish_reason: str
    status: int
    error: str


class SessionPage(Struct, frozen=True, kw_only=True):
    """Reply of `GET /api/sessions`: newest first."""

    object: Literal["list"] = "list"
    data: list[SessionSummary]
    total: int
    """Sessions in all."""
    limit: int
    offset: int
    persistent: bool
    """False: kept in memory only, until the gateway stops."""
    dropped_rows: int
    """Requests that could not be written since the gateway started."""


class SessionDetail(Struct, frozen=True, kw_only=True):
    """Reply of `GET /api/sessions/{id}`."""

    session: SessionSummary
    requests: list[RequestSummary]
    """The last ones, newest first."""
