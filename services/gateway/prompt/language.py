"""The text side of a served model: from messages to token ids, and what turns its tokens into text again."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from hashlib import blake2b
from typing import Any

from tokenizers import Tokenizer

from services.gateway.output.token_bytes import TokenBytes
from services.gateway.prompt.template import ChatTemplate, TemplateFailed
from services.protocol.events import SpecialTokens, TokenizerBundle

THREAD_FROM_CHARS = 2000
"""Shorter texts are tokenized on the event loop: 1 ms at most, while a hop to a thread and back costs 0.1 ms."""

_REMEMBERED = 256


class PromptTooLong(ValueError):
    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"{tokens} tokens > {limit} maximum")
        self.tokens = tokens
        self.limit = limit


class Language:
    """Immutable but for its memory of prompts that were too long. Used on the event loop's thread."""

    def __init__(self, bundle: TokenizerBundle, threads: Executor) -> None:
        """Takes up to 2 seconds for a vocabulary of 250,000. Raises ValueError for a tokenizer that cannot be read."""
        try:
            self._tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ValueError(f"the model's tokenizer cannot be read: {error}") from error
        # Some tokenizer files carry the lengths of their training; a prompt is neither cut nor padded here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._threads = threads
        self.special: SpecialTokens = bundle.special
        self.token_bytes = TokenBytes.from_tokenizer_json(bundle.tokenizer_json, silent=bundle.special.stop_ids)
        self.generation_defaults: Mapping[str, float] = bundle.generation_defaults
        self._template: ChatTemplate | TemplateFailed
        try:
            self._template = ChatTemplate(bundle.chat_template, bundle.special.tokens)
        except TemplateFailed as error:
            self._template = error  # the model is listed all the same: its chats get this answer
        self._too_long: OrderedDict[bytes, int] = OrderedDict()

    async def prompt(self, messages: Sequence[Mapping[str, Any]], limit: int) -> list[int]:
        """The ids of a chat up to where the answer begins: fewer than `limit`, so that one more token fits.

        As in other servers, the rendered text is encoded as a whole: a special token that a user writes out is that
        special token. Raises TemplateFailed and PromptTooLong; since an agent repeats a refused prompt up to 40 times,
        the lengths of those are remembered.
        """
        if isinstance(self._template, TemplateFailed):
            raise self._template
        text = self._template.render(messages)
        if len(text) < THREAD_FROM_CHARS:
            ids = self.encode(text)
            if len(ids) >= limit:
                raise PromptTooLong(len(ids), limit)
            return ids
        key = blake2b(text.encode(), digest_size=16).digest()
        if key in self._too_long:
            self._too_long.move_to_end(key)
            if self._too_long[key] >= limit:
                raise PromptTooLong(self._too_long[key], limit)
        ids = await asyncio.get_running_loop().run_in_executor(self._threads, self.encode, text)
        if len(ids) >= limit:
            self._too_long[key] = len(ids)
            if len(self._too_long) > _REMEMBERED:
                self._too_long.popitem(last=False)
            raise PromptTooLong(len(ids), limit)
        return ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text, the beginning-of-text token in front where the model wants one. From any thread."""
        # The batch call releases the GIL; `encode` holds it for the whole text, 0.5 s and more for a long prompt.
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        bos = self.special.bos_id
        if self.special.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids
