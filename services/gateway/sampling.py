"""From a request's sampling wishes to the engine's fields, with the model's own defaults in between."""

import secrets
from collections.abc import Iterable, Mapping

from services.gateway.conversation import SamplingWishes
from services.gateway.errors import invalid
from services.protocol.generate import SamplingParams, ThoughtLimit

FORBIDDEN = 100.0
"""The largest bias of OpenAI's API, defined there as a ban."""


def sampling_params(
    wishes: SamplingWishes,
    *,
    defaults: Mapping[str, float],
    stop_token_ids: tuple[int, ...],
    vocab_size: int,
    room: int,
    default_max_tokens: int,
    forbidden: Iterable[int] = (),
    thoughts: ThoughtLimit | None = None,
) -> SamplingParams:
    """`defaults`: the model's own, for what the wishes leave open; a penalty among them is left out of a greedy
    request, which asks for the model's own first choice. `forbidden`: tokens that must not come.
    `thoughts`: where the engine ends them.

    `room`: tokens that fit behind the prompt, at least 1; a larger limit is cut to it, never refused.

    `default_max_tokens`: for a request without a limit; 0 is all the room. Raises ApiError for a `logit_bias` of a
    token that the model does not have.
    """
    limit = wishes.limit or default_max_tokens or room
    bias = dict(wishes.logit_bias or {})
    for token in bias:
        if not 0 <= token < vocab_size:
            raise invalid(f"logit_bias: The model has no token {token}; ids go to {vocab_size - 1}.", "logit_bias")
    bias |= dict.fromkeys(forbidden, -FORBIDDEN)
    temperature = _choose(wishes.temperature, defaults, "temperature", 1.0)
    return SamplingParams(
        max_tokens=min(limit, room),
        temperature=temperature,
        top_k=max(0, int(_choose(wishes.top_k, defaults, "top_k", 0))),
        top_p=_choose(wishes.top_p, defaults, "top_p", 1.0),
        min_p=_choose(wishes.min_p, defaults, "min_p", 0.0),
        repetition_penalty=_choose(wishes.repetition_penalty, defaults, "repetition_penalty", 1.0),
        presence_penalty=_choose(wishes.presence_penalty, defaults if temperature else {}, "presence_penalty", 0.0),
        frequency_penalty=wishes.frequency_penalty or 0.0,
        logit_bias=bias,
        # Half of the signed range, which every encoding of a seed on the way holds.
        seed=secrets.randbits(63) if wishes.seed is None else wishes.seed & (2**63 - 1),
        stop_token_ids=stop_token_ids,
        thoughts=thoughts,
    )


def _choose(given: float | None, defaults: Mapping[str, float], name: str, otherwise: float) -> float:
    return given if given is not None else defaults.get(name, otherwise)
