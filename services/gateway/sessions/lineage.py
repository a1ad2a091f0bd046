"""Which conversation a prompt belongs to, when its client does not say: found by the chain hashes of its blocks.

A block's name implies its whole prefix, so a prompt that holds the last block of a conversation's previous prompt
continues that conversation. What two prompts share need not be history, though: agents share tools and system prompt.
Two requests of one conversation also share their first user message; so only sessions of the same *opening* (a digest
of everything up to the first user message, made from text) are compared. The rule, with d the deepest known block
of the prompt and S the session that recorded d first:

* no known block (a new opening, or a prompt under 64 tokens): a new session;
* d is the last block of some session's newest prompt: the prompt repeats or continues that session;
* d lies further up in S: the prompt leaves S's history in the middle (a sub-agent with the same history, an edited
  message, an older turn asked again): a new session whose parent is S. Where no opening is known, a fork cannot be
  told from a shared system prompt, and no parent is set.

Limits: all this is as exact as a block, so a fork inside the last, unfinished block looks like a repeat. Of several
requests that continue the same prompt at once, the first keeps the session and the others become its children, whoever
the main agent was. A chat template that drops earlier reasoning rewrites history, so that a conversation goes on as
a child.
"""

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.gateway.sessions.records import SessionSource
from services.protocol.hashing import HASH_BYTES, BlockHash

OPENING_BYTES = 16
TAIL_BLOCKS = 32
"""Block names of a session that the database keeps, so that its lineage outlives the gateway."""
MAX_BLOCKS = 2**17
"""22 MB (CPython 3.11); 32 contexts of 262,144 tokens."""
MAX_SESSIONS = 2**14


def opening_digest(parts: Iterable[str]) -> bytes:
    """Digest of a conversation's opening: role and content of each message up to the first user message, tools before.

    Equal only for equal sequences of parts (each is hashed with its length).
    """
    digest = hashlib.blake2b(digest_size=OPENING_BYTES, person=b"samovar-opening")
    for part in parts:
        data = part.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


@dataclass(slots=True, eq=False)
class Conversation:
    """What is known of a session. Mutable: `opening` and `tail` follow its newest prompt."""

    id: str
    source: str
    """A SessionSource."""
    parent: str | None = None
    opening: bytes = b""
    tail: bytes = b""
    """Names of the newest prompt's last blocks, at most TAIL_BLOCKS, one behind the other."""

    @property
    def tip(self) -> bytes:
        """The key of the newest prompt's last block."""
        return self.opening + self.tail[-HASH_BYTES:]


class Lineage:
    """An index from block names to sessions, bounded by least recent use of both. One thread (the event loop)."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_blocks = max_blocks
        self._max_sessions = max_sessions
        self._blocks: OrderedDict[bytes, Conversation] = OrderedDict()
        """opening + block name -> the session that recorded it first."""
        self._sessions: OrderedDict[str, Conversation] = OrderedDict()
        self._tips: dict[bytes, Conversation] = {}
        """opening + last block name of a newest prompt -> its session (the latest, should two end alike). A session
        that forked without a full block of its own is found here only."""

    def __len__(self) -> int:
        """Blocks in the index."""
        return len(self._blocks)

    def get(self, session_id: str) -> Conversation | None:
        return self._sessions.get(session_id)

    def named(
        self,
        session_id: str,
        source: SessionSource,
        opening: bytes,
        hashes: Sequence[BlockHash],
        parent: str | None = None,
    ) -> Conversation:
        """The session of a name that its client gave, with the parent that it gave: its word is all that counts."""
        session = self._sessions.get(session_id) or Conversation(session_id, source, parent)
        self._advance(session, opening, hashes)
        return session

    def infer(self, opening: bytes, hashes: Sequence[BlockHash]) -> Conversation:
        """The session of an unnamed prompt, by the module's rule."""
        session = self._match(opening, hashes)
        self._advance(session, opening, hashes)
        return session

    def restore(self, session: Conversation) -> None:
        """Take back a session of an earlier process, unless it is known already. Oldest first, so that a shared
        prefix goes to the session that recorded it first."""
        if session.id in self._sessions:
            return
        self._sessions[session.id] = session
        if session.tail:
            self._tips.setdefault(session.tip, session)
        for start in range(0, len(session.tail), HASH_BYTES):
            self._blocks.setdefault(session.opening + session.tail[start : start + HASH_BYTES], session)
        self._trim()

    def _match(self, opening: bytes, hashes: Sequence[BlockHash]) -> Conversation:
        for name in reversed(hashes):
            key = opening + name
            if (tip := self._tips.get(key)) is not None:
                return tip
            if (owner := self._blocks.get(key)) is not None:
                return Conversation(uuid.uuid4().hex, "lineage", parent=owner.id if opening else None)
        return Conversation(uuid.uuid4().hex, "lineage")

    def _advance(self, session: Conversation, opening: bytes, hashes: Sequence[BlockHash]) -> None:
        """Make `hashes` the newest prompt of `session`, and both the most recently used."""
        self._sessions[session.id] = session
        self._sessions.move_to_end(session.id)
        self._forget_tip(session)
        session.opening = opening
        session.tail = b"".join(hashes[-TAIL_BLOCKS:])
        if hashes:
            self._tips[session.tip] = session
        for name in hashes:
            key = opening + name
            self._blocks.setdefault(key, session)
            self._blocks.move_to_end(key)
        self._trim()

    def _trim(self) -> None:
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        while len(self._sessions) > self._max_sessions:
            _, session = self._sessions.popitem(last=False)
            self._forget_tip(session)

    def _forget_tip(self, session: Conversation) -> None:
        if self._tips.get(session.tip) is session:
            del self._tips[session.tip]
