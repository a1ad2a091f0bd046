"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from services.gateway.config import GatewayConfig
from services.gateway.engine_client import EngineClient
from services.gateway.engine_errors import EngineError, NoEngine
from services.gateway.errors import as_api_error, from_engine, invalid, model_not_found, too_long, unavailable
from services.gateway.ledger import Ledger
from services.gateway.metrics import Metrics
from services.gateway.openai.chat_response import ChatResponse
from services.gateway.openai.messages import for_template
from services.gateway.openai.request import ChatRequest, parse
from services.gateway.openai.sampling import sampling_params
from services.gateway.openai.thinking import template_variables
from services.gateway.openai.tools import function_tools
from services.gateway.output.answer import Answer
from services.gateway.output.parser import OutputParser
from services.gateway.output.tool_arguments import Tools
from services.gateway.output.tool_calls import OPEN_CALL
from services.gateway.prompt.language import Language, Prompt, PromptTooLong
from services.gateway.prompt.languages import Languages
from services.gateway.prompt.presets import sampling_defaults
from services.gateway.prompt.template import TemplateFailed
from services.gateway.routes.body import read_body
from services.gateway.sessions.lineage import opening_digest
from services.gateway.sessions.records import SessionHint
from services.gateway.sessions.store import SessionStore
from services.gateway.stream import SHUTTING_DOWN, EventStream, OpenAnswers, WholeAnswer
from services.gateway.token_stream import TokenStream
from services.protocol import hashing
from services.protocol.events import ModelCard
from services.protocol.generate import SamplingParams

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ChatRoute:
    """Takes a chat from its bytes to the response that will answer it: all that may be refused is decided here,
    before any header is sent."""

    config: GatewayConfig
    engines: EngineClient
    languages: Languages
    sessions: SessionStore
    metrics: Metrics
    open_answers: OpenAnswers

    def handler(self) -> HTTPRouteHandler:
        @post(PATH, status_code=200)
        async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
            return await self.answer(request)

        return chat_completions

    async def answer(self, request: Request[Any, Any, Any]) -> ASGIApp:
        """Raises ApiError."""
        arrived = time.perf_counter()
        chat = parse(await read_body(request, self.config.body_limit))
        card = self._card(chat.model)
        if self.open_answers.draining:
            raise unavailable(SHUTTING_DOWN)
        ledger = Ledger(
            uuid.uuid4().hex,
            card.name,
            PATH,
            self.metrics,
            self.sessions,
            arrived=arrived,
            traceparent=request.headers.get("traceparent", ""),
        )
        try:
            answer = await self._ask(chat, card, ledger, request.headers.get("x-session-id", ""))
        except BaseException as error:
            ledger.refused(as_api_error(error) if isinstance(error, Exception) else unavailable(SHUTTING_DOWN))
            raise
        response = ChatResponse(ledger.request_id, card.name, int(time.time()), chat.include_usage)
        if chat.stream:
            return EventStream(answer, response, self.open_answers, self.config.keepalive)
        return WholeAnswer(answer, response, self.open_answers)

    def _card(self, model: str | None) -> ModelCard:
        """The card of the asked model, or of the first where none is named. Raises ApiError."""
        cards = self.engines.models()
        for card in cards:
            if not model or card.name == model:
                return card
        if not cards or (model and self.engines.known(model)):
            raise unavailable(_missing(self.engines))
        raise model_not_found(model or "", [card.name for card in cards])

    async def _ask(self, chat: ChatRequest, card: ModelCard, ledger: Ledger, session_header: str) -> Answer:
        try:
            language = await self.languages.of(card)
        except NoEngine as error:
            raise unavailable(str(error)) from error
        messages = for_template(chat.messages)
        tools = function_tools(chat.tools or ())
        prompt = await _prompt(messages, tools, template_variables(chat), card, language)
        call_token = language.token_id(OPEN_CALL)
        sampling = sampling_params(
            chat,
            defaults=sampling_defaults(language.generation_defaults, prompt.thinking),
            stop_token_ids=language.special.stop_ids,
            vocab_size=card.vocab_size,
            room=card.max_model_len - len(prompt.ids),
            default_max_tokens=self.config.default_max_tokens,
            # The tools stay in the prompt, or all of its cache would be lost for one turn without calls.
            forbidden=[call_token] if tools and not chat.may_call and call_token is not None else [],
        )
        opening = opening_digest(_opening(messages))
        ledger.asked(sampling, self._session(chat, card, opening, prompt.ids, session_header), bool(chat.stream))
        stream = await self._generate(chat, card, prompt, sampling, ledger)
        parser = OutputParser(
            language.token_bytes,
            chat.stops,
            thinking=prompt.opens_thoughts,
            tools=Tools(tools) if chat.may_call else None,
        )
        return Answer(stream, parser, ledger)

    async def _generate(
        self, chat: ChatRequest, card: ModelCard, prompt: Prompt, sampling: SamplingParams, ledger: Ledger
    ) -> TokenStream:
        try:
            return await self.engines.generate(
                card.name,
                prompt.ids,
                sampling,
                request_id=ledger.request_id,
                cache_salt=chat.cache_salt or "",
                session_id=ledger.session_id,
                tokenizer_digest=card.tokenizer_digest,
                hints=prompt.hints,
                span=ledger.span,
            )
        except EngineError as error:
            raise from_engine(error, len(prompt.ids), card.max_model_len) from error

    def _session(self, chat: ChatRequest, card: ModelCard, opening: bytes, prompt: Sequence[int], header: str) -> str:
        hint = SessionHint(
            opening=opening,
            session_id=chat.session_id or "",
            header=header,
            prompt_cache_key=chat.prompt_cache_key or "",
            user=chat.user or "",
        )
        root = hashing.root(card.fingerprint, chat.cache_salt or "")
        return self.sessions.resolve(hint, list(hashing.chain(root, prompt, card.block_tokens)))


async def _prompt(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    card: ModelCard,
    language: Language,
) -> Prompt:
    """Raises ApiError."""
    try:
        return await language.prompt(messages, card.max_model_len, tools=tools, variables=variables)
    except PromptTooLong as error:
        raise too_long(error.tokens, error.limit) from None
    except TemplateFailed as error:
        raise invalid(f"The messages do not fit the model's chat template: {error}", "messages") from error


def _opening(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Role and content of each message up to the first user message: what tells two conversations apart."""
    for message in messages:
        yield message["role"]
        yield message["content"]
        if message["role"] == "user":
            return


def _missing(engines: EngineClient) -> str:
    return f"No engine is ready: {engines.waiting_for() or 'the one that had this model is gone'}."
