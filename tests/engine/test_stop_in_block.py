"""A stop token amid the tokens that one step gave: what lies behind it never was."""

import pytest

from services.protocol.hashing import BLOCK_TOKENS, root
from services.protocol.hashing import chain as names_of
from tests.engine.rig import FINGERPRINT, Rig, request
from tests.engine.test_resume import positions, tokens
from tests.fakes import continuation

BLOCK = 6
CUT = 3
"""Tokens of the block up to the stop token."""


def names(ids: list[int]) -> set[bytes]:
    return set(names_of(root(FINGERPRINT, ""), ids))


@pytest.mark.parametrize("slots", [0, 6])
@pytest.mark.parametrize("committed", [58, 59, 60, 61, 62, 63, 64, 100])
@pytest.mark.parametrize("before", [0, 4])
def test_nothing_behind_the_stop_token_is_kept(before: int, committed: int, slots: int) -> None:
    """`committed`: tokens that the step's block follows, the last `before` of which were generated. With 58 to 60 of
    them the block, but not its part up to the stop token, ends a page."""
    prompt = tokens(committed - before)
    answer = continuation(prompt, before + BLOCK)
    kept = answer[: before + CUT]
    stop = kept[-1]
    assert stop not in kept[:-1]
    rig = Rig(slots=slots)
    rig.runner.burst = lambda name, position: BLOCK if position == committed else 1
    rig.serve(request("first", prompt, max_tokens=50, stop=(stop,)))
    assert rig.told["first"] == kept
    assert rig.finish_of("first") == "stop"
    assert rig.usage("first").output_tokens == before + CUT
    assert rig.on_device <= names(prompt + kept)
    assert all(position <= committed + CUT for position in positions(rig))
    # The next turn, and one in which another says what the model was about to say.
    told = prompt + kept
    for name, turn in (("next", told + tokens(30, 7)), ("other", prompt + answer + tokens(30, 7))):
        rig.serve(request(name, turn, max_tokens=9))
        assert rig.told[name] == continuation(turn, 9)
        assert rig.usage(name).cached_tokens <= committed + CUT
    if committed >= BLOCK_TOKENS:
        least = committed if slots else committed // BLOCK_TOKENS * BLOCK_TOKENS
        assert rig.usage("next").cached_tokens >= least
    rig.settle()
