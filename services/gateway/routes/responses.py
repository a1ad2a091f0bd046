"""POST /v1/responses, and what was stored by it. All paths are also served without `/v1`."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import Parameter
from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import Struct

from services.gateway.asking import Arrival, Asking
from services.gateway.client_marks import session_hint
from services.gateway.conversation import Conversation, Question
from services.gateway.errors import ApiError, invalid, unsupported
from services.gateway.openapi.described import GENERATES, KEY, READS_BODY, Described
from services.gateway.resends import identity
from services.gateway.responses import tools
from services.gateway.responses.events import ResponsesRenderer
from services.gateway.responses.input_items import Item, as_items, for_template
from services.gateway.responses.request import ResponsesRequest, parse
from services.gateway.responses.response_object import ResponseObject
from services.gateway.responses.store import NO_HISTORY, History, ResponseStore
from services.gateway.routes.body import read_body
from services.gateway.sessions.records import ResponseRecord
from services.gateway.thinking import template_variables

PATH = "/v1/responses"

ResponseId = Annotated[str, Parameter(description="A response's id")]

_OVERFLOW = "context_length_exceeded"
_json = msgspec.json.Encoder().encode


class InputTokens(Struct, frozen=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Deleted(Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


_STORED = (400, 404, 503)
_CREATES = Described(
    summary="Answer a chat, OpenAI's Responses API",
    body=ResponsesRequest,
    example={"input": "Hello!"},
    answer=ResponseObject,
    events=True,
    errors=GENERATES,
    links=tuple(
        (name, "response_id")
        for name in (
            "get_v1_responses_response_id",
            "get_v1_responses_response_id_input_items",
            "delete_v1_responses_response_id",
        )
    ),
)
_COUNTS = Described(
    summary="Count the tokens of a response's input",
    body=ResponsesRequest,
    example={"input": "Hello!"},
    errors=READS_BODY,
)
_GETS = Described(summary="A stored response", answer=ResponseObject, errors=_STORED)
_DELETES = Described(summary="Forget a stored response", errors=_STORED)
_LISTS = Described(summary="The input items of a stored response", errors=_STORED)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request with the conversation that it is a part of."""

    request: ResponsesRequest
    question: Question
    history: History
    items: list[Item]
    """Its own."""


@dataclass(frozen=True, slots=True)
class ResponsesRoute:
    asking: Asking
    store: ResponseStore

    def handlers(self) -> list[HTTPRouteHandler]:
        @post(_both(PATH), status_code=200, opt={KEY: _CREATES})
        async def create_response(request: Request[Any, Any, Any]) -> ASGIApp:
            return await self._create(request)

        @post(_both(f"{PATH}/input_tokens"), status_code=200, opt={KEY: _COUNTS})
        async def count_input_tokens(request: Request[Any, Any, Any]) -> InputTokens:
            asked = await self._asked(await self._body(request), request.headers)
            return InputTokens(await self.asking.count(asked.question))

        @get(_both(f"{PATH}/{{response_id:str}}"), opt={KEY: _GETS})
        async def get_response(
            response_id: ResponseId, stream: Annotated[bool, Parameter()] = False
        ) -> Response[bytes]:
            if stream:
                raise unsupported("stream", "stream: A stored response is given whole.")
            return Response((await self.store.get(response_id)).response, media_type="application/json")

        @delete(_both(f"{PATH}/{{response_id:str}}"), status_code=200, opt={KEY: _DELETES})
        async def delete_response(response_id: ResponseId) -> Deleted:
            await self.store.delete(response_id)
            return Deleted(response_id)

        @get(_both(f"{PATH}/{{response_id:str}}/input_items"), opt={KEY: _LISTS})
        async def list_input_items(
            response_id: ResponseId,
            limit: Annotated[int, Parameter(ge=1, le=100)] = 20,
            order: Annotated[Literal["asc", "desc"], Parameter()] = "desc",
            after: Annotated[str | None, Parameter()] = None,
        ) -> ItemList:
            return _page(await self.store.inputs(response_id), limit, order, after)

        return [create_response, count_input_tokens, get_response, delete_response, list_input_items]

    async def _create(self, request: Request[Any, Any, Any]) -> ASGIApp:
        """Raises ApiError."""
        at = time.perf_counter()
        body = await self._body(request)
        asked = await self._asked(body, request.headers)
        traceparent = request.headers.get("traceparent", "")
        arrival = Arrival(PATH, traceparent, identity=identity(PATH, request.headers, body), at=at)
        try:
            answer = await self.asking.ask(asked.question, arrival)
        except ApiError as error:
            if error.code == _OVERFLOW and asked.question.stream:
                return self._overflown(asked, error)
            raise
        renderer = self._renderer(asked, answer.ledger.request_id, answer.ledger.model)
        return self.asking.respond(answer, renderer, stream=asked.question.stream)

    async def _body(self, request: Request[Any, Any, Any]) -> bytes:
        """Raises ApiError."""
        return await read_body(request, self.asking.config.body_limit)

    async def _asked(self, body: bytes, headers: Mapping[str, str]) -> _Asked:
        """Raises ApiError."""
        given = parse(body)
        previous = given.previous_response_id
        history = await self.store.history(previous) if previous else NO_HISTORY
        items = as_items(given.input, uuid.uuid4().hex)
        return _Asked(given, _question(given, headers, history, items), history, items)

    def _renderer(self, asked: _Asked, request_id: str, model: str) -> ResponsesRenderer:
        given = asked.request
        begun = ResponseObject.begun(given, f"resp_{request_id}", model, int(time.time()))

        def keep(final: ResponseObject) -> None:
            self.store.keep(
                ResponseRecord(
                    id=final.id,
                    chain=asked.history.chain or final.id,
                    previous=given.previous_response_id or None,
                    created=time.time(),
                    response=_json(final),
                    items=_json(asked.items),
                )
            )

        return ResponsesRenderer(begun, tools.custom_names(given.tools or ()), keep if given.stored else None)

    def _overflown(self, asked: _Asked, error: ApiError) -> ASGIApp:
        """Codex recognises an overflow as an event of a stream only, and takes a 400 for a fault of its own."""
        self.asking.metrics.error(_OVERFLOW)
        renderer = self._renderer(asked, uuid.uuid4().hex, self.asking.served.card(asked.request.model).name)
        return _Events(renderer.opening + renderer.error(error))


class _Events:
    """A stream whose events are all known. ASGI."""

    def __init__(self, events: bytes) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._events, "more_body": False})


def _both(path: str) -> list[str]:
    return [path, path.removeprefix("/v1")]


def _question(given: ResponsesRequest, headers: Mapping[str, str], history: History, items: list[Item]) -> Question:
    """Raises ApiError."""
    messages = for_template(given.instructions, [*history.items, *items], len(history.items))
    if not messages:
        raise invalid("input: A response needs at least one message.", "input")
    return Question(
        prompt=Conversation(
            messages=messages,
            tools=tools.for_template(given.tools or ()),
            variables=template_variables(given),
            may_call=given.may_call,
        ),
        model=given.model,
        sampling=given.sampling,
        stream=bool(given.stream),
        session=session_hint(
            headers, session_id=given.session_id, prompt_cache_key=given.prompt_cache_key, user=given.user
        ),
        cache_salt=given.cache_salt or "",
    )


def _page(items: list[Item], limit: int, order: Literal["asc", "desc"], after: str | None) -> ItemList:
    """Raises ApiError for an `after` that names none of the items."""
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise invalid(f"after: There is no item `{after}`.", "after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(ordered) > limit,
    )
