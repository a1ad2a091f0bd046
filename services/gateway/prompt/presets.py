"""Sampling defaults that a model's card gives and its `generation_config.json` cannot hold: it knows one mode only."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    thinking: Mapping[str, float]
    """What the family writes into `generation_config.json`: these values are how the family is known."""
    plain: Mapping[str, float]
    """What its card advises for answers without thinking."""


PRESETS = (
    # The cards of Qwen3.5 and its successors.
    Preset(
        thinking={"temperature": 1.0, "top_p": 0.95, "top_k": 20},
        plain={"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
    ),
    # Qwen3.
    Preset(
        thinking={"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        plain={"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    ),
)


def sampling_defaults(generation: Mapping[str, float], thinking: bool | None) -> Mapping[str, float]:
    """`generation`: the model's own defaults; `thinking`: whether this answer thinks, None where the model has no such
    choice. Only an answer without thinking, of a family that is known, gets other values than the model's own."""
    if thinking is False:
        for preset in PRESETS:
            if all(generation.get(name) == value for name, value in preset.thinking.items()):
                return {**generation, **preset.plain}
    return generation
