"""The text side of a served model: from messages to token ids, and what turns its tokens into text again."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar, TypeVarTuple

from tokenizers import Tokenizer

from services.gateway.output.thoughts import CLOSE, OPEN
from services.gateway.output.token_bytes import TokenBytes
from services.gateway.prompt.boundaries import TURN_OPENERS, Boundaries
from services.gateway.prompt.marked import Part
from services.gateway.prompt.template import ChatTemplate, TemplateFailed
from services.gateway.prompt.written_answer import WrittenAnswer, written_answer
from services.gateway.sessions.records import AnswerRecord, CallRecord
from services.protocol.events import SpecialTokens, TokenizerBundle
from services.protocol.generate import ThoughtLimit, pack_ids

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREAD_FROM_CHARS = 2000
"""Shorter texts are rendered and tokenized on the event loop: 1 ms at most each, while a hop to a thread and back costs
0.1 ms."""

_STOP_THINKING = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    f"{CLOSE}\n\n"
)
"""How the family's thoughts are cut: the words of its makers (Qwen3 Technical Report, 2025, on the thinking budget)."""
_REMEMBERED = 256
_TAIL_CHARS = 64
"""Of a prompt, in which it shows whether thoughts are open."""
_LEAD_CHARS = 256
"""Of a prompt, in which the answer's turn is opened."""


class PromptTooLong(ValueError):
    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"{tokens} tokens > {limit} maximum")
        self.tokens = tokens
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    hints: tuple[int, ...]
    """Prompt lengths at which later prompts may part from this one, as `GenerateRequest.hints`."""
    opens_thoughts: bool | None
    """It ends within the model's thoughts; None where all that follows is plain text."""
    thinking: bool | None
    """Whether the model is to think; None where it has no such choice."""
    lead: str = ""
    """Its end, from the token that opens the answer's turn on; empty where there is none, and for a raw prompt."""


class Language:
    """Immutable but for its memory of prompts that were too long. Used on the event loop's thread."""

    def __init__(self, bundle: TokenizerBundle, threads: Executor) -> None:
        """Takes up to 3 seconds for a vocabulary of 250,000. Raises ValueError for a tokenizer that cannot be read."""
        try:
            self._tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ValueError(f"the model's tokenizer cannot be read: {error}") from error
        # Some tokenizer files carry the lengths of their training; a prompt is neither cut nor padded here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._threads = threads
        self._added = {token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items()}
        self._boundaries = Boundaries.of(self.token_id)
        self.special: SpecialTokens = bundle.special
        self._cuttable = self._cuts_before_turns()
        self.token_bytes = TokenBytes.from_tokenizer_json(bundle.tokenizer_json, silent=bundle.special.stop_ids)
        self.generation_defaults: Mapping[str, float] = bundle.generation_defaults
        self._template: ChatTemplate | TemplateFailed
        try:
            self._template = ChatTemplate(bundle.chat_template, bundle.special.tokens)
        except TemplateFailed as error:
            self._template = error  # the model is listed all the same: its chats get this answer
        self._too_long: OrderedDict[bytes, int] = OrderedDict()

    async def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        calls: Mapping[str, CallRecord] | None = None,
        answers: Mapping[int, Sequence[AnswerRecord]] | None = None,
    ) -> Prompt:
        """A chat up to where the answer begins: fewer than `limit` tokens, so that one more fits.

        `tools`, `variables` and `calls` go to the template. `answers`: what the model may have written for messages of
        its own, by their places, the oldest first; where a message says the same, its ids stand in the prompt. As in
        other servers, the text between is encoded as a whole: a special token that a user writes out is that special
        token. Raises TemplateFailed and PromptTooLong; since an agent repeats a refused prompt up to 40 times, the
        lengths of those are remembered.
        """
        if isinstance(self._template, TemplateFailed):
            raise self._template
        variables = variables or {}
        render = self._template.parts
        written = {}
        if answers and self._cuttable:
            written = await self._on_thread(self._written, messages, answers, calls or {})
        if _short(messages, tools) and not written:
            parts = render(messages, tools, variables, calls)
        else:
            parts = await self._on_thread(render, messages, tools, variables, calls, written)
        ids, hints = await self._encoded(parts, limit)
        last = parts[-1] if parts and isinstance(parts[-1], str) else ""
        tail = last[-_TAIL_CHARS:].rstrip()
        thinking: bool | None = None
        if tail.endswith((OPEN, CLOSE)):
            thinking = tail.endswith(OPEN)
        elif "enable_thinking" in self._template.variables:
            thinking = variables.get("enable_thinking", True) is not False
        return Prompt(ids, hints, tail.endswith(OPEN), thinking, _lead(last) if self._cuttable else "")

    async def raw_prompt(self, prompt: str | Sequence[int], limit: int) -> Prompt:
        """A text or ids that no template touches. Raises PromptTooLong."""
        if isinstance(prompt, str):
            ids, hints = await self._encoded([prompt], limit)
            return Prompt(ids, hints, opens_thoughts=None, thinking=None)
        if len(prompt) >= limit:
            raise PromptTooLong(len(prompt), limit)
        return Prompt(list(prompt), self._boundaries.hints(prompt), opens_thoughts=None, thinking=None)

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: Mapping[int, Sequence[AnswerRecord]],
        calls: Mapping[str, CallRecord],
    ) -> dict[int, WrittenAnswer]:
        found = {
            place: written_answer(messages[place], records, calls, self.token_bytes)
            for place, records in answers.items()
        }
        return {place: answer for place, answer in found.items() if answer is not None}

    async def _encoded(self, parts: Sequence[Part], limit: int) -> tuple[list[int], tuple[int, ...]]:
        """Ids and hints; a long text is encoded on a thread. Raises PromptTooLong."""
        if sum(map(len, parts)) < THREAD_FROM_CHARS:
            ids, hints = self._encode_with_hints(parts)
            if len(ids) >= limit:
                raise PromptTooLong(len(ids), limit)
            return ids, hints
        key = _digest(parts)
        if key in self._too_long:
            self._too_long.move_to_end(key)
            if self._too_long[key] >= limit:
                raise PromptTooLong(self._too_long[key], limit)
        ids, hints = await self._on_thread(self._encode_with_hints, parts)
        if len(ids) >= limit:
            self._too_long[key] = len(ids)
            if len(self._too_long) > _REMEMBERED:
                self._too_long.popitem(last=False)
            raise PromptTooLong(len(ids), limit)
        return ids, hints

    async def _on_thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _encode_with_hints(self, parts: Sequence[Part]) -> tuple[list[int], tuple[int, ...]]:
        ids = self._ids(parts)
        return ids, self._boundaries.hints(ids)

    def _cuts_before_turns(self) -> bool:
        """Whether a text gives the same ids in two pieces as in one: some tokenizers put a space in front of each."""
        opener = next((text for text in TURN_OPENERS if text in self._added), None)
        return opener is not None and self._ids(["a" + opener + "a"]) == self._ids(["a", opener, "a"])

    def token_id(self, text: str) -> int | None:
        """Of a token that is not learned but added, `<tool_call>` for one; None where there is none."""
        return self._added.get(text)

    def thought_limit(self, budget: int) -> ThoughtLimit | None:
        """The end of thoughts that may have `budget` tokens, at least 1, with what closes them. None where no one token
        closes thoughts."""
        close = self.token_id(CLOSE)
        if close is None:
            return None
        closing = self._tokenizer.encode(_STOP_THINKING, add_special_tokens=False).ids
        return ThoughtLimit(tokens=max(1, budget - closing.index(close) - 1), close=close, closing=tuple(closing))

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens spelled out."""
        if len(ids) < THREAD_FROM_CHARS:
            return self._decode(ids)
        return await self._on_thread(self._decode, ids)

    def _decode(self, ids: Sequence[int]) -> str:
        # As in `encode`: `decode` would hold the GIL, 0.2 s for 200,000 ids.
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, the beginning-of-text token in front where the model wants one. From any thread."""
        return self._ids([text])

    def _ids(self, parts: Sequence[Part]) -> list[int]:
        """Texts encoded each by itself, with the ids between them as they are."""
        texts = [part for part in parts if isinstance(part, str)]
        # The batch call releases the GIL; `encode` holds it for the whole text, 0.5 s and more for a long prompt.
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        ids: list[int] = []
        for part in parts:
            ids += next(encoded).ids if isinstance(part, str) else part
        bos = self.special.bos_id
        if self.special.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids


def _lead(text: str) -> str:
    """From the last token that opens a turn on; empty where none stands near the end."""
    text = text[-_LEAD_CHARS:]
    return text[start:] if (start := max(map(text.rfind, TURN_OPENERS))) >= 0 else ""


def _digest(parts: Sequence[Part]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else pack_ids(part)
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _short(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat is rendered faster than handed to a thread. Calls and declarations of tools are written out as
    JSON by the template, so that their length is not seen here."""
    if tools or any("tool_calls" in message for message in messages):
        return False
    texts = (message.get(field) or "" for message in messages for field in ("content", "reasoning_content"))
    return sum(map(len, texts)) < THREAD_FROM_CHARS
