"""NATS subjects and the ids within them."""

import pytest

from services.protocol import subjects

OF_ENGINE = (subjects.generate, subjects.cancel, subjects.resume, subjects.tokenizer, subjects.blocks)
FIXED = (subjects.HEARTBEATS, subjects.GATEWAY_HEARTBEATS, subjects.BLOCK_EVENTS)


@pytest.mark.parametrize("name", ["a", "engine-0", "A-Z-09", "x" * 64])
def test_valid_ids(name: str) -> None:
    assert subjects.valid_id(name)


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "a b", "a\n", "é", "x" * 65, "a_b", "$SYS"])
def test_ids_that_would_be_no_single_token(name: str) -> None:
    assert not subjects.valid_id(name)


def test_no_two_subjects_are_alike() -> None:
    names = [make(engine) for make in OF_ENGINE for engine in ("engine-0", "engine-1")]
    names += [subjects.tokens("engine-0"), *FIXED]
    assert len(set(names)) == len(names)


def test_subjects_are_plain_tokens_under_one_root() -> None:
    for subject in (*FIXED, *(make("engine-0") for make in OF_ENGINE), subjects.tokens("gateway-1")):
        tokens = subject.split(".")
        assert tokens[0] == "samovar"
        assert all(subjects.valid_id(token) for token in tokens)
    assert all(make("engine-7").split(".")[2] == "engine-7" for make in OF_ENGINE)
