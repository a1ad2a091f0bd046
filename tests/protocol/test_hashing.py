"""The chain hash and the packing of ids beneath it."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.protocol import hashing
from services.protocol.generate import pack_ids, unpack_ids

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=400)


@given(IDS)
def test_ids_survive_packing(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert unpack_ids(packed) == ids
    assert len(packed) == 4 * len(ids)


def test_packed_ids_are_little_endian() -> None:
    assert pack_ids([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert pack_ids(iter([5])) == b"\x05\0\0\0"
    assert pack_ids([]) == b""
    assert unpack_ids(b"") == []


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_what_is_no_id_is_not_packed(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack_ids(ids)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_cut_id_is_an_error(length: int) -> None:
    with pytest.raises(ValueError):
        unpack_ids(bytes(length))


def test_known_names() -> None:
    """Names live in kvstores and in other engines: they never change by accident."""
    assert hashing.root("model", "salt").hex() == "fea40da9df03cd0718bed49c2563585f7362b858ba18ceb4ccc0ab3280ef014a"
    first, second = hashing.chain(hashing.root("model"), range(128))
    assert first.hex() == "f3dd580205ab5d520cead3b0743df9f397b42f9863c034185b3ea0d76148013f"
    assert second.hex() == "5c813b3763e410868b24135a94944a8778ab79d48736ba202d93c88b67283748"
    assert second == hashlib.blake2b(first + pack_ids(range(64, 128)), digest_size=32).digest()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (63, 0), (64, 1), (65, 1), (127, 1), (128, 2)])
def test_only_full_blocks_have_a_name(tokens: int, blocks: int) -> None:
    names = list(hashing.chain(hashing.root("m"), range(tokens)))
    assert len(names) == blocks
    assert all(len(name) == hashing.HASH_BYTES for name in names)


def test_fingerprint_and_salt_name_different_roots() -> None:
    roots = [hashing.root(*pair) for pair in (("ab", ""), ("a", "b"), ("", "ab"), ("b", "a"), ("", ""), ("ab", "ab"))]
    assert len(set(roots)) == len(roots)
    assert hashing.root("a", "b") == hashing.root("a", "b")


@given(IDS, st.integers(1, 70), st.integers(0, 400))
def test_a_chain_can_be_continued_at_any_block(ids: list[int], block: int, cut: int) -> None:
    root = hashing.root("m", "s")
    whole = list(hashing.chain(root, ids, block))
    done = whole[: min(cut, len(whole))]
    rest = hashing.chain(done[-1] if done else root, ids[len(done) * block :], block)
    assert done + list(rest) == whole
    parent = root
    for number, name in enumerate(whole):
        parent = hashing.extend(parent, ids[number * block : (number + 1) * block])
        assert parent == name


@given(st.lists(st.integers(0, 9), min_size=192, max_size=192), st.integers(0, 191), st.integers(1, 5))
def test_a_changed_token_renames_its_block_and_all_behind(ids: list[int], position: int, by: int) -> None:
    root = hashing.root("m")
    before = list(hashing.chain(root, ids))
    changed = [*ids[:position], ids[position] + by, *ids[position + 1 :]]
    after = list(hashing.chain(root, changed))
    same = position // hashing.BLOCK_TOKENS
    assert after[:same] == before[:same]
    assert all(new != old for new, old in zip(after[same:], before[same:], strict=True))


def test_root_parent_and_ids_all_count() -> None:
    ids = list(range(64))
    names = {
        hashing.extend(hashing.root("a"), ids),
        hashing.extend(hashing.root("b"), ids),
        hashing.extend(hashing.root("a", "salt"), ids),
        hashing.extend(hashing.extend(hashing.root("a"), ids), ids),
        hashing.extend(hashing.root("a"), ids[::-1]),
    }
    assert len(names) == 5
