"""What a cached object is worth to keep: one rule for an engine's device and for the kvstore.

    value = seconds that it saves * chance that it is asked for again / bytes that it takes

The seconds are those of computing it again, or of restoring it where another tier has it too. The chance is `chance`
of its session's standing at its last use, and halves every half-life from then on.
"""

import math

from services.protocol.generate import Standing

HALF_LIFE = 600.0
"""Seconds after which an object that nobody uses is worth half. An agent's tool call or its user's next message mostly
comes within minutes, so that within them the cost of recomputing decides and beyond them recency does."""

LEAST_SECONDS = 1e-6
MOST_SECONDS = 3600.0
"""That a cost is clamped to, so that nobody can make an object that outlives all others for days."""

LEAST_CHANCE = 2.0**-16
SHARED = 1.0
"""Chance of what several sessions have used: the tools and the system text of all agents."""


def chance(standing: Standing) -> float:
    """A judgement, in half-lives: an idle session is given up like one that waits for its tool and was used 10 minutes
    longer ago, a side request's prompt like one of 50 minutes longer ago, a finished sub-agent's of an hour."""
    match standing:
        case "live" | "waiting":
            return 1.0
        case "idle":
            return 2.0**-1
        case "one_off":
            return 2.0**-5
        case "finished":
            return 2.0**-6


def density(seconds: float, length: int) -> float:
    """log2 of what an object saves a byte: `seconds` are clamped, `length` is in bytes."""
    return math.log2(min(max(seconds, LEAST_SECONDS), MOST_SECONDS) / length)


def score(density: float, chance: float, used: float, half_life: float = HALF_LIFE) -> float:
    """What an object is worth, on a scale that time does not move.

    value(t) = 2 ** density * chance * 2 ** -((t - used) / half_life). The ratio of two such values does not depend on
    t, so objects may be ordered once, by log2(value(t)) + t / half_life, and only a use or another chance moves one.
    `used` and `half_life` are in seconds, of one clock for all that is compared.
    """
    return density + math.log2(min(max(chance, LEAST_CHANCE), 1.0)) + used / half_life
