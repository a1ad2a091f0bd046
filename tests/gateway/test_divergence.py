"""Where prompts part, against the naive loop; what is kept of them, and for how long."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.divergence import BYTES, CONTEXTS, Contexts, Near, Parting, common, parting
from services.gateway.prompt.language import Language
from services.gateway.turns import OPENING, Place, Turns
from services.protocol.generate import pack_ids
from tests.gateway.tiny import tiny_bundle

TURN, RESULT = 256, 0x0102_0001  # an id whose bytes may be found across two others
ROOT, OTHER_ROOT = b"r" * 32, b"o" * 32
IDS = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 256, 0x0100_0000, 0x0001_0001, TURN, RESULT])


def naive(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def turns(*roles: str, tools: bool = False) -> Turns:
    return Turns(TURN, RESULT, roles, tools)


def chat(*texts: str) -> list[int]:
    """Turns, and the one that is to be answered; each text is its bytes."""
    return [id for text in (*texts, "assistant\n") for id in (TURN, *text.encode())]


@settings(max_examples=150, deadline=None)
@given(shared=st.lists(IDS, max_size=60), one=st.lists(IDS, max_size=8), other=st.lists(IDS, max_size=8))
def test_common_is_what_the_loop_finds(shared: list[int], one: list[int], other: list[int]) -> None:
    one, other = shared + one, shared + other
    assert common(pack_ids(one), pack_ids(other)) == naive(one, other)


@pytest.mark.parametrize("at", [0, 1, 16_383, 16_384, 16_385, 40_000, 65_535])
def test_common_of_long_prompts(at: int) -> None:
    one = list(range(65_536))
    assert common(pack_ids(one), pack_ids([*one[:at], 2**31, *one[at + 1 :]])) == at
    assert common(pack_ids(one), pack_ids(one[:at])) == at


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(IDS, min_size=1, max_size=30),
    cuts=st.lists(st.tuples(st.integers(0, 30), st.lists(IDS, max_size=5)), max_size=6),
)
def test_the_most_similar_context_is_found(prompt: list[int], cuts: list[tuple[int, list[int]]]) -> None:
    earlier = [prompt[:cut] + rest for cut, rest in cuts]
    contexts = Contexts()
    for ids in earlier:
        contexts.began(ROOT, "s", pack_ids(ids), Turns(None))
    kept = [context.ids for context in contexts.near(ROOT, "s", None).contexts]
    found = parting(pack_ids(prompt), contexts.near(ROOT, "s", None), Turns(None))
    shared = [naive(prompt, [*memoryview(ids).cast("I")]) for ids in kept]
    best = max(shared, default=0)
    assert (found.position if found is not None else 0) == best
    if found is not None:
        newest = kept[shared.index(best)]
        assert found.diverged == (4 * best < min(len(newest), 4 * len(prompt)))


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(IDS, max_size=80), start=st.integers(0, 40))
def test_turns_are_found_at_tokens_only(ids: list[int], start: int) -> None:
    packed = pack_ids(ids)
    roles = ("user",) * max(0, ids.count(RESULT) - 1)
    place = Turns(RESULT, None, roles).place(packed, start)
    turn = sum(id == RESULT for id in ids[: start + 1]) - 1
    assert (place is not None and place.message == turn) if 0 <= turn < len(roles) else place is None
    last = max((i for i, id in enumerate(ids) if id == RESULT and i), default=len(ids))
    assert Turns(RESULT).suffix(packed) == last


@pytest.mark.parametrize(
    ("roles", "tools", "texts", "inside", "expected"),
    [
        (["user"], False, ["hi"], 0, Place(0, "user")),
        (["system", "user"], False, ["be", "hi"], 0, Place(OPENING, "system")),
        (["system", "user"], True, ["be", "hi"], 0, Place(OPENING, "tools and system")),
        (["user"], True, ["tools", "hi"], 0, Place(OPENING, "tools")),
        (["user"], True, ["tools", "hi"], 1, Place(0, "user")),
        (["system", "system", "user"], False, ["be", "hi"], 1, Place(2, "user")),
        (["user", "assistant", "tool", "tool", "user"], False, ["a", "b", "c", "d"], 3, Place(4, "user")),
        (["user", "assistant", "tool", "tool", "user"], False, ["a", "b", "c", "c", "d"], 3, Place(3, "tool")),
        (["user", "assistant", "system", "user"], False, ["a", "b", "c", "d"], 2, Place(2, "system")),
        (["user"], False, ["hi"], 1, None),
        (["user", "user"], False, ["hi", "there", "more", "turns"], 0, None),
    ],
)
def test_the_message_of_a_token(
    roles: list[str], tools: bool, texts: list[str], inside: int, expected: Place | None
) -> None:
    ids = chat(*texts)
    position = [i for i, id in enumerate(ids) if id == TURN][inside] + 1
    assert turns(*roles, tools=tools).place(pack_ids(ids), position) == expected


def test_the_tool_result_of_a_token_within_one_turn() -> None:
    ids = [TURN, 1, TURN, 2, TURN, RESULT, 3, RESULT, 4, RESULT, 5, TURN]
    where = turns("user", "assistant", "tool", "tool", "tool")
    assert [where.place(pack_ids(ids), at) for at in (4, 6, 7, 8, 10)] == [
        Place(number, "tool") for number in (2, 2, 3, 3, 4)
    ]


class Session:
    """Asks one prompt after the other of `Contexts`."""

    def __init__(self, contexts: Contexts | None = None) -> None:
        self.contexts = contexts or Contexts()

    def ask(
        self,
        ids: list[int],
        *roles: str,
        output: str = "",
        session: str = "s",
        parent: str | None = None,
        root: bytes = ROOT,
    ) -> Parting | None:
        packed, where = pack_ids(ids), turns(*roles)
        found = parting(packed, self.contexts.near(root, session, parent), where)
        context = self.contexts.began(root, session, packed, where)
        self.contexts.ended(root, context, list(output.encode()))
        return found


def test_what_a_conversation_does() -> None:
    session = Session()
    first = chat("system", "question")
    assert session.ask(first, "system", "user", output="answer") is None
    going_on = [*first, *b"answer", *chat("more")]
    known = len(first) + len("answer")
    assert session.ask(going_on, "system", "user", "assistant", "user", output="yes") == Parting("s", known, False)
    # The same once more, then with another first question, then with the first answer changed.
    assert session.ask(going_on, "system", "user", "assistant", "user") == Parting("s", len(going_on), False)
    edited = chat("system", "quest!")
    assert session.ask(edited, "system", "user") == Parting("s", 13, True, 1, "user")
    rewritten = [*first, *b"ans!", *chat("more")]
    assert session.ask(rewritten, "system", "user", "assistant", "user") == Parting(
        "s", len(first) + 3, True, 2, "assistant"
    )
    # The last message is taken back: nothing of what is left is new but the turn to be answered.
    shorter = Session()
    shorter.ask(chat("system", "question", "answer", "more"), "system", "user", "assistant", "user")
    assert shorter.ask(first, "system", "user") == Parting("s", len(first) - len("assistant\n") + 1, False)


def test_an_answer_that_comes_back_changed_or_not_at_all() -> None:
    session = Session()
    first = chat("question")
    session.ask(first, "user", output="<think>well</think>answer")
    dropped = [*first, *b"answer", *chat("more")]
    assert session.ask(dropped, "user", "assistant", "user") == Parting(
        "s", len(first), True, 1, "assistant", generated=True
    )
    # The client left in the middle of an answer, and asks something else.
    session = Session()
    session.ask(first, "user", output="<think>we")
    given_up = chat("question", "never mind")
    assert session.ask(given_up, "user", "user") == Parting("s", len(first) - len("assistant\n"), False)


def test_a_fork_is_compared_to_its_parent_and_a_new_session_to_all() -> None:
    session = Session()
    session.ask(chat("system", "one"), "system", "user", session="a")
    assert session.ask(chat("system", "two"), "system", "user", session="b", parent="a") == Parting(
        "a", 8, True, 1, "user"
    )
    assert session.ask(chat("system", "three"), "system", "user", session="c") == Parting(
        "b", 9, True, 1, "user", own=False
    )
    assert session.ask(chat("system", "two"), "system", "user", session="d", root=OTHER_ROOT) is None


def test_a_context_that_is_gone_on_with_is_not_kept_twice_and_few_are_kept() -> None:
    contexts = Contexts()
    session = Session(contexts)
    ids = chat("a")
    for _ in range(10):
        session.ask(ids, output="b")
        ids = [*ids, *b"b", *chat("c")]
    assert len(contexts.near(ROOT, "s", None).contexts) == 1
    for number in range(10):
        session.ask([number])
    near = contexts.near(ROOT, "s", None)
    assert [context.ids for context in near.contexts] == [pack_ids([n]) for n in (9, 8, 7, 6)]
    assert len(near.contexts) == CONTEXTS


def test_the_bytes_are_bounded_and_the_oldest_sessions_go_first() -> None:
    contexts = Contexts(10_000)
    session = Session(contexts)
    for number in range(50):
        session.ask([number] * 100, session=f"s{number}", output="x" * 100)
        assert contexts.size <= 10_000
    assert contexts.near(ROOT, "s49", None).own
    assert not contexts.near(ROOT, "s0", None).own
    session.ask([7] * 100_000, session="huge")
    assert contexts.size == 0
    assert contexts.near(ROOT, "s49", None) == Near((), False)
    late = contexts.began(ROOT, "late", pack_ids([1]), Turns(None))
    session.ask([7] * 100_000, session="huge")
    contexts.ended(ROOT, late, [2])  # forgotten meanwhile
    assert contexts.size == 0


def test_a_long_prompt_costs_a_millisecond() -> None:
    ids = [(7 * n) % 248_000 for n in range(262_144)]
    ids[::500] = [TURN] * len(ids[::500])
    where = Turns(TURN, RESULT, ("user",) * (ids.count(TURN) - 1))
    contexts = Contexts(BYTES)
    contexts.began(ROOT, "s", pack_ids(ids), where)
    ids[261_999] += 1
    packed = pack_ids(ids)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        found = parting(packed, contexts.near(ROOT, "s", None), where)
        seconds.append(time.perf_counter() - start)
        assert found is not None
        assert (found.position, found.diverged) == (261_999, True)
    assert min(seconds) < 0.02  # 0.7 ms on a quiet core


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which files?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": f"call{n}", "type": "function", "function": {"name": "read", "arguments": {"path": n}}} for n in "ab"
        ],
    },
    {"role": "tool", "tool_call_id": "calla", "content": "nothing here"},
    {"role": "tool", "tool_call_id": "callb", "content": "some words"},
    {"role": "system", "content": "Time passes."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Which?"},
]
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", [[], [READ]])
async def test_the_message_that_was_changed_is_named_with_the_family_s_own_template(tools: list[Any]) -> None:
    with ThreadPoolExecutor(1) as threads:
        language = Language(tiny_bundle(), threads)

        async def packed(messages: list[dict[str, Any]]) -> bytes:
            return pack_ids((await language.prompt(messages, 10_000, tools=tools)).ids)

        where = Turns.of(language.token_id, HISTORY, tools)
        contexts = Contexts()
        contexts.began(ROOT, "s", await packed(HISTORY), where)
        for number, message in enumerate(HISTORY):
            changed = [*HISTORY[:number], {**message, "content": "Not that."}, *HISTORY[number + 1 :]]
            found = parting(await packed(changed), contexts.near(ROOT, "s", None), where)
            assert found is not None
            expected = (number, message["role"])
            if number == 0:
                expected = (OPENING, "tools and system" if tools else "system")
            assert (found.diverged, found.message, found.role) == (True, *expected)
        without = await language.prompt(HISTORY, 10_000, tools=[{**READ, "type": "other"}])
        found = parting(
            pack_ids(without.ids), contexts.near(ROOT, "s", None), Turns.of(language.token_id, HISTORY, [1])
        )
        assert found is not None
        assert (found.message, found.role) == (OPENING, "tools and system")
