"""From a question to its answer under way: all that may be refused is decided here, before any header is sent."""

import asyncio
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from litestar.types import ASGIApp

from services.gateway.config import GatewayConfig
from services.gateway.conversation import Conversation, Question, RawPrompt
from services.gateway.dispatch import HASH_INLINE_TOKENS
from services.gateway.divergence import Contexts, parting
from services.gateway.engine_client import EngineClient
from services.gateway.engine_errors import EngineError, NoEngine
from services.gateway.errors import as_api_error, from_engine, invalid, too_long, unavailable
from services.gateway.ledger import Ledger
from services.gateway.metrics import Metrics
from services.gateway.output.answer import Answer
from services.gateway.output.parser import OutputParser
from services.gateway.output.structure import OPEN_CALL
from services.gateway.output.tool_arguments import Tools
from services.gateway.prompt.client_headers import without_headers
from services.gateway.prompt.language import Language, Prompt, PromptTooLong
from services.gateway.prompt.languages import Languages
from services.gateway.prompt.presets import sampling_defaults
from services.gateway.prompt.template import TemplateFailed
from services.gateway.recollection import Recollection
from services.gateway.renderer import Renderer
from services.gateway.resends import Identity, Running
from services.gateway.sampling import sampling_params
from services.gateway.served import ServedModels
from services.gateway.sessions.lineage import opening_digest
from services.gateway.sessions.store import SessionStore
from services.gateway.standing import Errand, Errands
from services.gateway.stream import SHUTTING_DOWN, EventStream, OpenAnswers, WholeAnswer
from services.gateway.token_stream import TokenStream
from services.gateway.turns import Turns
from services.protocol import hashing
from services.protocol.events import ModelCard
from services.protocol.generate import FinishReason, SamplingParams, pack_ids
from services.protocol.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a question came in."""

    route: str
    """The path of its endpoint."""
    traceparent: str = ""
    """The client's, or empty."""
    operation: str = "chat"
    """As OpenTelemetry's conventions for generative AI name it."""
    identity: Identity | None = None
    """Where the same request may be sent again and join."""
    at: float = field(default_factory=time.perf_counter)
    """time.perf_counter()."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What every endpoint that generates is made of: `ask`, then `respond`. On the event loop's thread."""

    config: GatewayConfig
    engines: EngineClient
    languages: Languages
    served: ServedModels
    sessions: SessionStore
    memory: Recollection
    contexts: Contexts
    metrics: Metrics
    open_answers: OpenAnswers
    running: Running = field(default_factory=Running)
    errands: Errands = field(default_factory=Errands)

    async def ask(self, question: Question, arrival: Arrival) -> Answer:
        """The answer, which an engine has begun. Its ledger is opened and closed with it, or here when the question
        is refused. Raises ApiError."""
        card = self.served.card(question.model)
        if self.open_answers.draining:
            raise unavailable(SHUTTING_DOWN)
        ledger = Ledger(
            uuid.uuid4().hex,
            card.name,
            arrival.route,
            self.metrics,
            self.sessions,
            arrived=arrival.at,
            traceparent=arrival.traceparent,
            operation=arrival.operation,
        )
        try:
            return await self._ask(question, card, ledger, arrival.identity)
        except BaseException as error:
            ledger.refused(as_api_error(error) if isinstance(error, Exception) else unavailable(SHUTTING_DOWN))
            raise

    def respond(self, answer: Answer, renderer: Renderer, *, stream: bool) -> ASGIApp:
        """The response that gives `answer` to its client in the words of `renderer`."""
        if stream:
            return EventStream(answer, renderer, self.open_answers, self.config.keepalive)
        return WholeAnswer(answer, renderer, self.open_answers)

    async def count(self, question: Question) -> int:
        """Prompt tokens that `ask` would send, also where they are too many. Raises ApiError."""
        return len(await self.tokens(question))

    async def tokens(self, question: Question) -> list[int]:
        """The prompt that `ask` would send, however long. Raises ApiError."""
        card = self.served.card(question.model)
        language = await self.language(card)
        return (await self._prompt(self._for_model(question), sys.maxsize, card, language)).ids

    async def language(self, card: ModelCard) -> Language:
        """Raises ApiError."""
        try:
            return await self.languages.of(card)
        except NoEngine as error:
            raise unavailable(str(error)) from error

    async def _ask(self, question: Question, card: ModelCard, ledger: Ledger, identity: Identity | None) -> Answer:
        language = await self.language(card)
        question = self._for_model(question)
        try:
            prompt = await self._prompt(question, card.max_model_len, card, language)
        except PromptTooLong as error:
            raise too_long(error.tokens, error.limit) from None
        chat = question.prompt if isinstance(question.prompt, Conversation) else Conversation(messages=())
        call_token = language.token_id(OPEN_CALL)
        budget = question.sampling.thoughts if prompt.opens_thoughts else None
        sampling = sampling_params(
            question.sampling,
            defaults=sampling_defaults(language.generation_defaults, prompt.thinking),
            stop_token_ids=language.special.stop_ids,
            vocab_size=card.vocab_size,
            room=card.max_model_len - len(prompt.ids),
            default_max_tokens=self.config.default_max_tokens,
            # The tools stay in the prompt, or all of its cache would be lost for one turn without calls.
            forbidden=[call_token] if chat.tools and not chat.may_call and call_token is not None else [],
            thoughts=language.thought_limit(budget) if budget is not None else None,
        )
        root = hashing.root(card.fingerprint, question.cache_salt)
        if len(prompt.ids) > HASH_INLINE_TOKENS:
            packed, names = await asyncio.to_thread(_packed_and_named, prompt.ids, root, card.block_tokens)
        else:
            packed, names = _packed_and_named(prompt.ids, root, card.block_tokens)
        ledger.asked(sampling, self._session(question, chat, names), question.stream)
        errand = self.errands.of(question, ledger.session_id)
        turns = Turns.of(language.token_id, chat.messages, chat.tools)
        near = self.contexts.near(root, errand.session_id, self.sessions.parent(ledger.session_id))
        if len(prompt.ids) > HASH_INLINE_TOKENS:
            ledger.parting = await asyncio.to_thread(parting, packed, near, turns)
        else:
            ledger.parting = parting(packed, near, turns)
        earlier = self.running.joinable(identity, packed) if identity is not None else None
        if earlier is not None:
            stream = earlier.hand_over()
        else:
            stream = await self._generate(question, card, prompt, sampling, ledger, errand)
        context = self.contexts.began(root, errand.session_id, packed, turns)
        parser = OutputParser(
            language.token_bytes,
            question.stops,
            thinking=prompt.opens_thoughts,
            tools=Tools(chat.tools) if chat.may_call else None,
        )
        answer = Answer(
            stream,
            parser,
            ledger,
            self.memory.heard_calls(card),
            partial(self.contexts.ended, root, context),
            self.memory.heard_answer(chat, question.cache_salt, card, prompt, stream, ledger.request_id),
            partial(self._left, errand),
        )
        if identity is not None:
            self.running.add(identity, answer)
        return answer

    async def _prompt(self, question: Question, limit: int, card: ModelCard, language: Language) -> Prompt:
        """Raises PromptTooLong, and ApiError for what the model's template refuses."""
        asked = question.prompt
        if isinstance(asked, RawPrompt):
            return await language.raw_prompt(asked.prompt, limit)
        known = await self.memory.of(asked, question.cache_salt, card)
        try:
            return await language.prompt(
                asked.messages,
                limit,
                tools=asked.tools,
                variables=asked.variables,
                calls=known.calls,
                answers=known.answers,
            )
        except TemplateFailed as error:
            raise invalid(f"The messages do not fit the model's chat template: {error}", "messages") from error

    async def _generate(
        self,
        question: Question,
        card: ModelCard,
        prompt: Prompt,
        sampling: SamplingParams,
        ledger: Ledger,
        errand: Errand,
    ) -> TokenStream:
        try:
            return await self.engines.generate(
                card.name,
                prompt.ids,
                sampling,
                request_id=ledger.request_id,
                cache_salt=question.cache_salt,
                session_id=errand.session_id,
                standing=errand.expected,
                tokenizer_digest=card.tokenizer_digest,
                hints=prompt.hints,
                span=ledger.span,
            )
        except EngineError as error:
            raise from_engine(error, len(prompt.ids), card.max_model_len) from error

    def _for_model(self, question: Question) -> Question:
        """Without what its client wrote into it for other readers."""
        asked = question.prompt
        if isinstance(asked, RawPrompt) or not self.config.strip_client_headers:
            return question
        return replace(question, prompt=replace(asked, messages=without_headers(asked.messages)))

    def _left(self, errand: Errand, finish: FinishReason, calls: int) -> None:
        """Tell the engines what an answer has made of its session."""
        if (standing := errand.left(finish, calls)) != errand.expected:
            self.engines.note(errand.session_id, standing)

    def _session(self, question: Question, chat: Conversation, names: Sequence[BlockHash]) -> str:
        opening = opening_digest(_opening(chat.messages)) if chat.messages else b""
        return self.sessions.resolve(msgspec.structs.replace(question.session, opening=opening), names)


def _packed_and_named(ids: Sequence[int], root: BlockHash, block_tokens: int) -> tuple[bytes, list[BlockHash]]:
    """A prompt as `pack_ids` has it, and the names of its full blocks."""
    packed = pack_ids(ids)
    return packed, hashing.chain_packed(root, packed, block_tokens)


def _opening(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Role and content of each message up to the first user message: what tells two conversations apart."""
    for message in messages:
        yield message["role"]
        yield message["content"]
        if message["role"] == "user":
            return
