"""The fields by which OpenAI's requests say how to sample, the same in every endpoint."""

from typing import Annotated

from msgspec import Meta, Struct

from services.gateway.conversation import SamplingWishes

Tokens = Annotated[int, Meta(ge=1)]


class SamplingFields(Struct, frozen=True, kw_only=True):
    """Part of a request's body. None everywhere means `not given`: many clients send null for that."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """-1 and 0 keep all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    def wishes(self, limit: int | None, thoughts: int | None = None) -> SamplingWishes:
        """`limit`: output tokens at most, `thoughts`: those of them that are thoughts; each endpoint has other names
        for these."""
        return SamplingWishes(
            limit=limit,
            thoughts=thoughts,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
        )
