"""Whether a request may enter the engine: its content (a pure check) and the room that there is."""

import math
from collections import deque
from collections.abc import Sequence

import msgspec

from services.protocol.events import ModelCard
from services.protocol.generate import GenerateRequest, Rejected, RejectReason, SamplingParams
from services.protocol.subjects import valid_id

RETRY_SECONDS_MAX = 30.0
RETRY_SECONDS_UNKNOWN = 2.0
RECENT = 64
"""Finished requests whose rate says how soon there is room."""


class Refused(Exception):
    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason: RejectReason = reason
        self.message = message

    def reply(self, request_id: str, retry_after: float = 1.0) -> Rejected:
        return Rejected(request_id, self.reason, self.message, retry_after)


def admit(wire: GenerateRequest, prompt: Sequence[int], generated: Sequence[int], card: ModelCard) -> SamplingParams:
    """The sampling parameters to run `wire` with: its own, `max_tokens` clamped to what the context holds.

    `prompt` and `generated` are the unpacked ids. Raises Refused: what comes from the bus may be anything, and a bad
    value must not get as far as the device.
    """
    if not valid_id(wire.gateway_id):
        raise Refused("bad_request", f"gateway id {wire.gateway_id!r} is no id")
    if not wire.request_id or len(wire.request_id) > 256:
        raise Refused("bad_request", "request ids have 1 to 256 characters")
    if not prompt:
        raise Refused("bad_request", "The prompt is empty.")
    for name, ids in (("prompt", prompt), ("generated", generated)):
        if ids and max(ids) >= card.vocab_size:
            raise Refused(
                "bad_request", f"{name} has token id {max(ids)}, the vocabulary ends at {card.vocab_size - 1}"
            )
    _check_sampling(wire.sampling, card.vocab_size)
    limit = card.max_model_len
    if len(prompt) >= limit:
        # Agents read these numbers and these words out of the message; they are the same at the gateway.
        raise Refused(
            "context_length",
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {len(prompt)} "
            "tokens. Please reduce the length of the messages "
            f"(prompt is too long: {len(prompt)} tokens > {limit} maximum).",
        )
    max_tokens = min(wire.sampling.max_tokens, limit - len(prompt))
    if len(generated) >= max_tokens:
        raise Refused("bad_request", f"{len(generated)} tokens are generated already, {max_tokens} are allowed")
    return msgspec.structs.replace(wire.sampling, max_tokens=max_tokens)


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    def check(good: bool, name: str, expected: str) -> None:
        if not good:
            raise Refused("bad_request", f"{name} must be {expected}, not {getattr(sampling, name)!r}")

    check(sampling.max_tokens >= 1, "max_tokens", "1 or more")
    # NaN fails every comparison, so each check is written as what must hold.
    check(0.0 <= sampling.temperature <= 100.0, "temperature", "0 to 100")
    check(sampling.top_k >= 0, "top_k", "0 or more")
    check(0.0 < sampling.top_p <= 1.0, "top_p", "above 0, 1 at most")
    check(0.0 <= sampling.min_p <= 1.0, "min_p", "0 to 1")
    check(0.0 < sampling.repetition_penalty <= 100.0, "repetition_penalty", "above 0, 100 at most")
    check(-100.0 <= sampling.presence_penalty <= 100.0, "presence_penalty", "-100 to 100")
    check(-100.0 <= sampling.frequency_penalty <= 100.0, "frequency_penalty", "-100 to 100")
    check(-(2**63) <= sampling.seed < 2**64, "seed", "a 64-bit integer")
    for token, bias in sampling.logit_bias.items():
        if not (0 <= token < vocab_size and math.isfinite(bias)):
            raise Refused("bad_request", f"logit_bias[{token}] = {bias}: needs a token id below {vocab_size}, finite")
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise Refused("bad_request", f"stop_token_ids has {token}, the vocabulary ends at {vocab_size - 1}")
    thoughts = sampling.thoughts
    if thoughts is not None:
        known = all(0 <= token < vocab_size for token in thoughts.closing)
        if thoughts.tokens < 1 or thoughts.close not in thoughts.closing or not known:
            raise Refused("bad_request", f"thoughts: {thoughts} does not close them, or not in this vocabulary")


class Admission:
    """Room for requests: `max_running` in the batch and `max_queue` behind it."""

    def __init__(self, max_running: int, max_queue: int) -> None:
        self.max_running = max_running
        self.max_queue = max_queue
        self._finished: deque[float] = deque(maxlen=RECENT)

    def check(self, open_requests: int) -> None:
        """Raises Refused when one more than `open_requests` is too many."""
        if open_requests >= self.max_running + self.max_queue:
            raise Refused(
                "overloaded",
                f"The server is overloaded: {self.max_running} requests may run and {self.max_queue} may wait, "
                "and all places are taken.",
            )

    def finished(self, now: float) -> None:
        """`now`: time.monotonic() seconds."""
        self._finished.append(now)

    def retry_after(self, now: float) -> float:
        """Seconds until a place is likely to be free, by the rate of the last requests that finished."""
        if len(self._finished) < 2:
            return RETRY_SECONDS_UNKNOWN
        return min(max(1.0, (now - self._finished[0]) / len(self._finished)), RETRY_SECONDS_MAX)
