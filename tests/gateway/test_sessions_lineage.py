"""Which conversation a prompt belongs to: made of real token chains, as the gateway makes them."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.sessions.lineage import TAIL_BLOCKS, Conversation, Lineage, opening_digest
from services.protocol import hashing

ROOT = hashing.root("model")
SYSTEM = range(200)
A = opening_digest(["system", "you help", "user", "fix bug A"])
B = opening_digest(["system", "you help", "user", "fix bug B"])


def blocks(*parts: Sequence[int]) -> list[bytes]:
    return list(hashing.chain(ROOT, [token for part in parts for token in part]))


def turn(number: int, tokens: int = 100) -> range:
    """Tokens that no other number has."""
    return range(number * 10_000, number * 10_000 + tokens)


def test_a_conversation_keeps_its_session_from_turn_to_turn() -> None:
    lineage = Lineage()
    ids = {lineage.infer(A, blocks(SYSTEM, *(turn(n) for n in range(1, length)))).id for length in range(2, 8)}
    assert len(ids) == 1


def test_the_same_prompt_again_is_the_same_session() -> None:
    lineage = Lineage()
    first = lineage.infer(A, blocks(SYSTEM, turn(1)))
    assert lineage.infer(A, blocks(SYSTEM, turn(1))) is first


def test_a_prompt_without_a_full_block_is_a_new_session_each_time() -> None:
    lineage = Lineage()
    assert blocks(range(63)) == []
    assert lineage.infer(A, []).id != lineage.infer(A, []).id


@pytest.mark.parametrize("tokens", [5, 300], ids=["shorter than a block", "longer than a block"])
def test_agents_that_share_a_system_prompt_are_different_sessions(tokens: int) -> None:
    lineage = Lineage()
    one = lineage.infer(A, blocks(SYSTEM, turn(1, tokens)))
    two = lineage.infer(B, blocks(SYSTEM, turn(2, tokens)))
    assert one.id != two.id
    assert two.parent is None
    # And stay so when they go on in turns.
    assert lineage.infer(A, blocks(SYSTEM, turn(1, tokens), turn(3))) is one
    assert lineage.infer(B, blocks(SYSTEM, turn(2, tokens), turn(4))) is two


def test_a_fork_is_a_child_and_both_go_on() -> None:
    lineage = Lineage()
    main = lineage.infer(A, blocks(SYSTEM, turn(1)))
    assert lineage.infer(A, blocks(SYSTEM, turn(1), turn(2))) is main
    fork = lineage.infer(A, blocks(SYSTEM, turn(1), turn(3)))
    assert fork is not main
    assert fork.parent == main.id
    assert lineage.infer(A, blocks(SYSTEM, turn(1), turn(3), turn(5))) is fork
    assert lineage.infer(A, blocks(SYSTEM, turn(1), turn(2), turn(4))) is main
    grandchild = lineage.infer(A, blocks(SYSTEM, turn(1), turn(3), turn(6)))
    assert grandchild.parent == fork.id


def test_an_older_turn_asked_again_is_a_child_that_goes_on_too() -> None:
    lineage = Lineage()
    main = lineage.infer(A, blocks(SYSTEM, turn(1)))
    lineage.infer(A, blocks(SYSTEM, turn(1), turn(2)))
    again = lineage.infer(A, blocks(SYSTEM, turn(1)))  # has no block that is not main's
    assert again.parent == main.id
    assert lineage.infer(A, blocks(SYSTEM, turn(1), turn(3))) is again


def test_without_an_opening_nobody_is_a_parent() -> None:
    lineage = Lineage()
    one = lineage.infer(b"", blocks(SYSTEM, turn(1)))
    two = lineage.infer(b"", blocks(SYSTEM, turn(2)))
    assert one.id != two.id
    assert two.parent is None
    assert lineage.infer(b"", blocks(SYSTEM, turn(1), turn(3))) is one


def test_a_named_session_is_found_by_its_prompts_too() -> None:
    lineage = Lineage()
    named = lineage.named("chat-1", "header", A, blocks(SYSTEM, turn(1)))
    assert lineage.infer(A, blocks(SYSTEM, turn(1), turn(2))) is named
    assert lineage.infer(A, blocks(SYSTEM, turn(1), turn(3))).parent == "chat-1"
    other = lineage.named("chat-2", "header", A, blocks(SYSTEM, turn(1)))
    assert other.parent is None
    assert lineage.named("chat-1", "user", B, []).source == "header"


def test_the_index_is_bounded_and_forgets_the_least_recently_used() -> None:
    lineage = Lineage(max_blocks=20, max_sessions=3)
    sessions = [lineage.infer(A, blocks(turn(n, 640))) for n in range(1, 5)]
    assert len(lineage) == 20
    assert lineage.get(sessions[0].id) is None
    assert lineage.infer(A, blocks(turn(4, 640), turn(5))) is sessions[3]
    assert lineage.infer(A, blocks(turn(1, 640), turn(5))) not in sessions


def test_restored_sessions_go_on_and_do_not_replace_newer_ones() -> None:
    before = Lineage()
    long = turn(1, 64 * (TAIL_BLOCKS + 10))
    session = before.infer(A, blocks(long))
    assert len(session.tail) == TAIL_BLOCKS * hashing.HASH_BYTES

    after = Lineage()
    restored = Conversation(session.id, session.source, session.parent, session.opening, session.tail)
    after.restore(restored)
    after.restore(Conversation(session.id, "user", None, B, b""))
    assert after.get(session.id) is restored
    assert after.infer(A, blocks(long, turn(2))) is restored
    fork = after.infer(A, blocks(long[: 64 * (TAIL_BLOCKS + 8)], turn(3)))
    assert fork.parent == session.id


def test_a_digest_of_an_opening_keeps_its_parts_apart() -> None:
    assert opening_digest(["ab", "c"]) != opening_digest(["a", "bc"])
    assert opening_digest(["a"]) != opening_digest(["a", ""])
    assert opening_digest(iter(["a", "b"])) == opening_digest(["a", "b"])
    assert opening_digest(["\ud800"])  # a lone surrogate, as JSON may hold


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(64, 200)), min_size=1, max_size=40))
def test_conversations_in_any_order_keep_apart(steps: list[tuple[int, int]]) -> None:
    """Each step lets one of five agents (same system prompt) speak again, some tokens longer than before."""
    lineage = Lineage()
    prompts: dict[int, list[int]] = {}
    ids: dict[int, str] = {}
    for step, (agent, tokens) in enumerate(steps):
        prompt = prompts.setdefault(agent, [*SYSTEM, agent])
        prompt += turn(step + 1, tokens)
        found = lineage.infer(opening_digest([str(agent)]), blocks(prompt))
        assert ids.setdefault(agent, found.id) == found.id
        assert found.parent is None
    assert len(set(ids.values())) == len(ids)
