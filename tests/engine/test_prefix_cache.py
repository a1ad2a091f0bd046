import pytest

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.prefix_cache import BlockChain, PrefixCache
from services.protocol import hashing
from services.protocol.hashing import chain, root

ROOT = root("model")


def cache_of(pages: int) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(pages)
    return pool, PrefixCache(pool)


def fill(pool: BlockPool, cache: PrefixCache, tokens: list[int]) -> list[int]:
    blocks = BlockChain(ROOT, tokens)
    pages = pool.allocate(blocks.full)
    for depth in range(blocks.full):
        pages[depth], _ = cache.insert(blocks.block(depth), pages[depth])
    return pages


def test_names_are_those_of_the_protocol() -> None:
    tokens = list(range(200))
    blocks = BlockChain(ROOT, tokens)
    assert blocks.full == 3
    assert [blocks.block(depth).name for depth in range(3)] == list(chain(ROOT, tokens))
    assert blocks.block(0).parent == b""
    assert blocks.block(2).parent == blocks.block(1).name
    with pytest.raises(IndexError, match="block 3 of 200 tokens is not full"):
        blocks.block(3)


def test_a_growing_sequence_hashes_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(parent: bytes, ids: list[int]) -> bytes:
        hashed.append(ids[0])
        return hashing.extend(parent, ids)

    monkeypatch.setattr("services.engine.cache.prefix_cache.extend", counting)
    tokens = list(range(128))
    blocks = BlockChain(ROOT, tokens)
    blocks.block(1)
    tokens += range(128, 256)
    blocks.block(3)
    blocks.block(0)
    assert hashed == [0, 64, 128, 192]
    assert blocks.block(3).name == list(chain(ROOT, tokens))[3]


def test_the_longest_prefix_is_found() -> None:
    pool, cache = cache_of(8)
    tokens = list(range(256))
    pages = fill(pool, cache, tokens)
    assert cache.match(BlockChain(ROOT, tokens)) == pages
    assert cache.match(BlockChain(ROOT, tokens[:191])) == pages[:2]
    assert cache.match(BlockChain(ROOT, [*tokens[:128], *range(500, 700)])) == pages[:2]
    assert cache.match(BlockChain(ROOT, tokens), start=2) == pages[2:]
    assert cache.match(BlockChain(root("model", "salt"), tokens)) == []
    assert cache.match(BlockChain(root("other"), tokens)) == []
    assert cache.match(BlockChain(ROOT, tokens[:63])) == []


def test_a_child_without_its_parent_is_no_hit() -> None:
    pool, cache = cache_of(4)
    tokens = list(range(128))
    blocks = BlockChain(ROOT, tokens)
    (page,) = pool.allocate(1)
    cache.insert(blocks.block(1), page)
    assert cache.match(BlockChain(ROOT, tokens)) == []


def test_what_is_computed_twice_is_kept_once() -> None:
    pool, cache = cache_of(4)
    tokens = list(range(64))
    (first,) = fill(pool, cache, tokens)
    block = BlockChain(ROOT, tokens).block(0)
    (second,) = pool.allocate(1)
    assert cache.insert(block, second) == (first, False)
    assert pool.available == 3
    pool.release([first])
    assert pool.available == 3, "the second holder's hold moved to the first page"
    pool.release([first])
    assert pool.available == 4
    pool.check_integrity()
