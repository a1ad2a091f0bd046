"""Why prompt tokens were computed: what the engine says of its cache and what the gateway sees of the text, as one."""

import time
from typing import Literal

from msgspec import Struct

from services.gateway.divergence import Parting
from services.protocol.generate import MissReason, Usage
from services.protocol.hashing import BLOCK_TOKENS

Lost = Literal["evicted", "no_checkpoint", "store_full", "store_lost", "store_away", "elsewhere"]
"""Why tokens that were seen before were not found. `elsewhere`: the engine does not know them, though the session has
asked them before: another engine had them, or this one before it was started anew, or too long ago; or the request
that brought them was given up before they were computed, or is being computed. Else as `MissReason`."""
Reason = Literal["new", "diverged"] | Lost


class Miss(Struct, frozen=True, kw_only=True):
    """The prompt is `found` tokens that were in a cache, then tokens up to `known` that were seen before and lost
    since, then tokens that differ from all that was seen. Positions and roles, never a text."""

    reason: Reason
    """Of the larger part of what was not found."""
    text: str
    """The same in words."""
    found: int
    known: int
    lost: Lost | None = None
    """What became of the tokens between `found` and `known`; None where there are fewer than a cache block."""
    since: float = 0.0
    """Unix seconds when the lost ones left the device; 0 where that is not known."""
    taker: str = ""
    """The session (or else the request) for which they did; empty where that is not known."""
    diverged_at: int | None = None
    """The first token at which the prompt says something else than the most similar one before it in its session. None
    where it goes on from that, and for a session's first prompt."""
    message: int | None = None
    """In which `diverged_at` lies, counted as in a chat's `messages`; -1: tools and system text. None: not known."""
    role: str = ""
    """That message's."""

    def tokens(self, prompt_tokens: int) -> dict[Reason, int]:
        """What was not found of a prompt of this length, by reason."""
        counts: dict[Reason, int] = {}
        if self.lost is not None:
            counts[self.lost] = self.known - self.found
        rest: Reason = "new" if self.diverged_at is None else "diverged"
        counts[rest] = prompt_tokens - (self.known if self.lost is not None else self.found)
        return {reason: count for reason, count in counts.items() if count > 0}


def explain(usage: Usage, parting: Parting | None, now: float | None = None) -> Miss | None:
    """None where nothing was missed that could have been found. `now`: Unix seconds that ages are counted to."""
    told, prompt = usage.missed, usage.prompt_tokens
    if told is None or told.position >= prompt:
        return None
    found = told.position
    own = parting if parting is not None and parting.own else None
    shared = own.position if own is not None else 0
    known = min(max(found, told.seen, shared), prompt)
    lost = _lost(told.reason, known - found)
    diverged = own is not None and own.diverged and known - shared < BLOCK_TOKENS
    rest: Reason = "diverged" if diverged else "new"
    reason = lost if lost is not None and known - found > prompt - known else rest
    if lost is None:
        known = found
    words = [_of_the_rest(own if diverged else None, parting, known, prompt)]
    if lost is not None:
        ago = (time.time() if now is None else now) - told.since if told.since else None
        words.insert(0 if reason == lost else 1, _of_the_lost(lost, found, known, ago, told.taker))
    return Miss(
        reason=reason,
        text="; ".join(word for word in words if word),
        found=found,
        known=known,
        lost=lost,
        since=told.since if lost is not None else 0.0,
        taker=told.taker if lost is not None else "",
        diverged_at=own.position if own is not None and diverged else None,
        message=own.message if own is not None and diverged else None,
        role=own.role if own is not None and diverged else "",
    )


def _lost(reason: MissReason, tokens: int) -> Lost | None:
    if tokens <= 0:
        return None
    if reason != "new":
        return reason
    return "elsewhere" if tokens >= BLOCK_TOKENS else None  # else a block that was never full


def _of_the_rest(diverged: Parting | None, parting: Parting | None, known: int, prompt: int) -> str:
    if diverged is not None:
        text = f"diverged at token {diverged.position}"
        if diverged.role:
            text += f", in {_place(diverged.message, diverged.role)}"
        return f"{text}, which is not what was generated there" if diverged.generated else text
    if known >= prompt:
        return ""
    if parting is None:
        return f"tokens {known} to {prompt} were never seen" if known else "never seen"
    if parting.own and parting.position >= prompt:
        return f"nothing is new: tokens {known} to {prompt} lie behind the last place that a cache keeps"
    if parting.own:
        return f"tokens {known} to {prompt} are new"
    text = f"never seen before in its session; session {parting.session_id} had the same up to token {parting.position}"
    return f"{text}, in {_place(parting.message, parting.role)}" if parting.role else text


def _place(message: int | None, role: str) -> str:
    return f"the opening ({role})" if message is None or message < 0 else f"message {message} ({role})"


def _of_the_lost(lost: Lost, found: int, known: int, ago: float | None, taker: str) -> str:
    tokens = f"tokens {found} to {known}"
    gone = "evicted"
    if ago is not None:
        gone += f" {max(ago, 0.0):.0f} s ago"
    if taker:
        gone += f" for session {taker}"
    match lost:
        case "evicted":
            return f"{tokens} were {gone}"
        case "store_full":
            return f"{tokens} were {gone}, and the kvstore had no room for them"
        case "store_lost":
            return f"{tokens} were {gone}, and the kvstore does not have them any more"
        case "store_away":
            return f"{tokens} were {gone}, and the kvstore cannot be asked"
        case "no_checkpoint":
            return f"no state was kept between token {found} and {known}"
        case "elsewhere":
            return f"{tokens} were seen before, but not by this engine as far as it remembers"
