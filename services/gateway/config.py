"""Settings of the gateway."""

from typing import Annotated

from msgspec import Struct

from services.settings import ByteSize, DrainTimeout, LogLevel, NatsUrl, describe


class GatewayConfig(Struct, frozen=True, kw_only=True):
    host: Annotated[str, describe("Address to serve on.")] = "127.0.0.1"
    port: Annotated[int, describe("Port to serve on; 0 lets the system choose.", ge=0, le=65535)] = 8080
    gateway_id: Annotated[
        str, describe("Name of this gateway on the bus; empty draws one.", pattern="^[A-Za-z0-9-]{0,64}$")
    ] = ""
    nats_url: NatsUrl = "nats://127.0.0.1:4222"
    api_keys: Annotated[
        tuple[str, ...],
        describe("Keys that clients must send, separated by commas; none: everyone is served."),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        describe(
            "Origins of web pages whose scripts may use this server, `*` in one stands for any text. By default pages "
            "that this machine serves; `*` alone lets every page that a user opens use it, so set keys with it."
        ),
    ] = ("http://localhost", "http://localhost:*", "http://127.0.0.1", "http://127.0.0.1:*")
    model_aliases: Annotated[
        tuple[str, ...],
        describe(
            "Other names that are taken for a model, for clients that know only some; one `*` stands for any text, and "
            "where that text is a served model's name it is that model, else the main one."
        ),
    ] = ("claude-*",)
    body_limit: Annotated[ByteSize, describe("Largest request body; a larger one is a 413.")] = ByteSize(64 * 2**20)
    database: Annotated[str, describe("SQLite file of the sessions; empty keeps them in memory only.")] = ""
    session_rows: Annotated[int, describe("Requests kept in the database; the oldest go first.", ge=100)] = 100_000
    response_rows: Annotated[
        int, describe("Stored responses kept in the database; those of the oldest chains go first.", ge=0)
    ] = 10_000
    response_bytes: Annotated[ByteSize, describe("Size of all stored responses together; the same go first.")] = (
        ByteSize(256 * 2**20)
    )
    call_rows: Annotated[
        int,
        describe(
            "Tool calls kept in the database as they were generated, for prompts in which they come back; the oldest "
            "go first.",
            ge=0,
        ),
    ] = 20_000
    call_bytes: Annotated[ByteSize, describe("Size of all those calls together; the same go first.")] = ByteSize(
        64 * 2**20
    )
    answer_rows: Annotated[
        int,
        describe(
            "Answers kept in the database as the token ids that were generated, for prompts in which they come back; "
            "the oldest go first.",
            ge=0,
        ),
    ] = 50_000
    answer_bytes: Annotated[ByteSize, describe("Size of all those answers together; the same go first.")] = ByteSize(
        64 * 2**20
    )
    strip_client_headers: Annotated[
        bool,
        describe(
            "Leave out of system messages the line that Claude Code writes in front for Anthropic's accounting: it may "
            "change with every request, and the whole prompt would be computed anew."
        ),
    ] = True
    default_max_tokens: Annotated[
        int, describe("Output tokens of a request that sets no limit; 0 allows what the context holds.", ge=0)
    ] = 0
    resume_timeout: Annotated[
        float, describe("Seconds that a stream waits for another engine when its own is lost.", ge=0)
    ] = 60.0
    keepalive: Annotated[
        float,
        describe("Seconds between `data:` chunks without content while a stream has nothing to say.", gt=0),
    ] = 5.0
    drain_timeout: DrainTimeout = 30.0
    log_level: LogLevel = "info"
