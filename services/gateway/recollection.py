"""What models wrote here, for the prompts in which it comes back, and what they write now, for those to come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.gateway.answer_memory import AnswerMemory, places
from services.gateway.call_memory import CallMemory
from services.gateway.conversation import Conversation
from services.gateway.output.heard_answer import HeardAnswer
from services.gateway.output.heard_calls import HeardCalls
from services.gateway.prompt.language import Prompt
from services.gateway.sessions.records import AnswerRecord, CallRecord
from services.gateway.token_stream import TokenStream
from services.protocol.events import ModelCard


@dataclass(frozen=True, slots=True)
class Recalled:
    """Of one conversation."""

    calls: Mapping[str, CallRecord]
    """By id."""
    answers: Mapping[int, Sequence[AnswerRecord]]
    """What may stand for which message, by its place; the oldest first."""


@dataclass(frozen=True, slots=True)
class Recollection:
    """On the event loop's thread."""

    calls: CallMemory
    answers: AnswerMemory

    async def of(self, chat: Conversation, salt: str, card: ModelCard) -> Recalled:
        """What the model of `card` may have written for the messages of a chat, within one `cache_salt`."""
        words = _words(card)
        return Recalled(
            await self.calls.of(chat.messages, card.tokenizer_digest),
            await self.answers.of(chat.messages, places(chat.messages, salt, words), words),
        )

    def heard_calls(self, card: ModelCard) -> HeardCalls:
        """Keeps the calls of an answer that begins."""
        return HeardCalls(card.tokenizer_digest, self.calls.keep)

    def heard_answer(
        self, chat: Conversation, salt: str, card: ModelCard, prompt: Prompt, stream: TokenStream, request_id: str
    ) -> HeardAnswer | None:
        """Keeps an answer that begins. None where nothing tells its turn in the prompt."""
        if not prompt.lead:
            return None
        words = _words(card)
        heard = HeardAnswer(
            request_id,
            place=places(chat.messages, salt, words)[len(chat.messages)],
            language=words,
            lead=prompt.lead,
            thinking=bool(prompt.opens_thoughts),
            tokens=stream.output,
            stop_ids=stream.sampling.stop_token_ids,
            keep=self.answers.keep,
        )
        self.answers.follow(heard)
        return heard


def _words(card: ModelCard) -> str:
    """As `AnswerRecord.language`: one tokenizer may serve models that know other ids beyond its own."""
    return f"{card.tokenizer_digest}/{card.vocab_size}"
