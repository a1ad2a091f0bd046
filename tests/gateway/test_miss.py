"""Why prompt tokens were computed, in one value and one sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.divergence import Parting
from services.gateway.miss import Miss, explain
from services.protocol.generate import Missed, MissReason, Usage

NOW = 1000.0


def usage(reason: MissReason, position: int, seen: int = 0, prompt: int = 2000, **fields: object) -> Usage:
    missed = Missed(reason=reason, position=position, seen=seen, **fields)  # type: ignore[arg-type]
    return Usage(prompt_tokens=prompt, output_tokens=1, missed=missed)


def on_from(position: int, session: str = "s") -> Parting:
    return Parting(session, position, diverged=False)


@pytest.mark.parametrize(
    ("told", "parting", "reason", "text", "tokens"),
    [
        (usage("new", 0), None, "new", "never seen", {"new": 2000}),
        (usage("new", 640), None, "new", "tokens 640 to 2000 were never seen", {"new": 1360}),
        (
            usage("new", 640),
            Parting("other", 700, True, -1, "system", own=False),
            "new",
            "never seen before in its session; session other had the same up to token 700, in the opening (system)",
            {"new": 1360},
        ),
        (
            usage("new", 640),
            Parting("other", 700, False, own=False),
            "new",
            "never seen before in its session; session other had the same up to token 700",
            {"new": 1360},
        ),
        (
            usage("new", 1990),
            on_from(2000),
            "new",
            "nothing is new: tokens 1990 to 2000 lie behind the last place that a cache keeps",
            {"new": 10},
        ),
        # A conversation goes on; what is between the last full block and its end is not lost.
        (usage("new", 1472), on_from(1500), "new", "tokens 1472 to 2000 are new", {"new": 528}),
        (
            usage("new", 1152),
            Parting("s", 1234, True, 7, "tool"),
            "diverged",
            "diverged at token 1234, in message 7 (tool); "
            "tokens 1152 to 1234 were seen before, but not by this engine as far as it remembers",
            {"elsewhere": 82, "diverged": 766},
        ),
        (
            usage("new", 1216),
            Parting("s", 1234, True, -1, "tools and system"),
            "diverged",
            "diverged at token 1234, in the opening (tools and system)",
            {"diverged": 784},
        ),
        (usage("new", 1216), Parting("s", 1234, True), "diverged", "diverged at token 1234", {"diverged": 784}),
        (
            usage("new", 1216),
            Parting("s", 1234, True, 3, "assistant", generated=True),
            "diverged",
            "diverged at token 1234, in message 3 (assistant), which is not what was generated there",
            {"diverged": 784},
        ),
        (
            usage("no_checkpoint", 1000, seen=1216),
            Parting("s", 1234, True, 7, "tool"),
            "diverged",
            "diverged at token 1234, in message 7 (tool); no state was kept between token 1000 and 1234",
            {"no_checkpoint": 234, "diverged": 766},
        ),
        (
            usage("no_checkpoint", 64, seen=1920),
            None,
            "no_checkpoint",
            "no state was kept between token 64 and 1920; tokens 1920 to 2000 were never seen",
            {"no_checkpoint": 1856, "new": 80},
        ),
        (
            usage("evicted", 0, seen=1984, since=688.0, taker="X"),
            on_from(2000),
            "evicted",
            "tokens 0 to 2000 were evicted 312 s ago for session X",
            {"evicted": 2000},
        ),
        (
            usage("store_full", 64, seen=1024, since=990.0, taker="X"),
            on_from(1990),
            "store_full",
            "tokens 64 to 1990 were evicted 10 s ago for session X, and the kvstore had no room for them; "
            "tokens 1990 to 2000 are new",
            {"store_full": 1926, "new": 10},
        ),
        (
            usage("store_lost", 0, seen=1024),
            None,
            "store_lost",
            "tokens 0 to 1024 were evicted, and the kvstore does not have them any more; "
            "tokens 1024 to 2000 were never seen",
            {"store_lost": 1024, "new": 976},
        ),
        (
            usage("store_away", 0, seen=2048, since=999.0),
            None,
            "store_away",
            "tokens 0 to 2000 were evicted 1 s ago, and the kvstore cannot be asked",
            {"store_away": 2000},
        ),
        (
            usage("new", 0),
            on_from(1900),
            "elsewhere",
            "tokens 0 to 1900 were seen before, but not by this engine as far as it remembers; "
            "tokens 1900 to 2000 are new",
            {"elsewhere": 1900, "new": 100},
        ),
    ],
)
def test_what_is_said(told: Usage, parting: Parting | None, reason: str, text: str, tokens: dict[str, int]) -> None:
    miss = explain(told, parting, NOW)
    assert miss is not None
    assert (miss.reason, miss.text, miss.tokens(told.prompt_tokens)) == (reason, text, tokens)


def test_nothing_missed_nothing_said() -> None:
    assert explain(Usage(prompt_tokens=9, output_tokens=1), on_from(3), NOW) is None
    assert explain(usage("new", 2000), None, NOW) is None


def test_the_fields_of_one_that_diverged_and_of_one_that_was_evicted() -> None:
    assert explain(usage("new", 1216), Parting("s", 1234, True, 7, "tool"), NOW) == Miss(
        reason="diverged",
        text="diverged at token 1234, in message 7 (tool)",
        found=1216,
        known=1216,
        diverged_at=1234,
        message=7,
        role="tool",
    )
    miss = explain(usage("evicted", 0, seen=1984, since=688.0, taker="X"), on_from(2000), NOW)
    assert miss is not None
    assert (miss.found, miss.known, miss.lost, miss.since, miss.taker) == (0, 2000, "evicted", 688.0, "X")


REASONS = st.sampled_from(["new", "evicted", "no_checkpoint", "store_full", "store_lost", "store_away"])


@given(
    reason=REASONS,
    position=st.integers(0, 3000),
    seen=st.integers(0, 4000),
    shared=st.none() | st.integers(0, 3000),
    diverged=st.booleans(),
    own=st.booleans(),
)
def test_all_that_was_not_found_has_a_reason(
    reason: MissReason, position: int, seen: int, shared: int | None, diverged: bool, own: bool
) -> None:
    parting = None if shared is None else Parting("s", min(shared, 2000), diverged, own=own)
    miss = explain(usage(reason, position, seen), parting, NOW)
    if position >= 2000:
        assert miss is None
        return
    assert miss is not None
    counts = miss.tokens(2000)
    assert sum(counts.values()) == 2000 - position
    assert counts[miss.reason] == max(counts.values())
    assert miss.found == position <= miss.known <= 2000
    assert miss.text
