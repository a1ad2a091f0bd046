"""The chain hash that names a cache block: router, prefix cache and kvstore share it.

hash(i) = blake2b-256(parent = hash(i - 1), the block's token ids), where the chain starts at
root(fingerprint, salt). So equal names mean equal content under equal weights, and a block's name implies its whole
prefix. A cryptographic hash, since a collision would hand one user's context to another.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

from services.protocol.generate import pack_ids

BLOCK_TOKENS = 64
HASH_BYTES = 32

BlockHash = bytes


KEPT_SALT = 256
"""Characters; the roots of longer salts, which clients choose, are not kept."""


def root(fingerprint: str, salt: str = "") -> BlockHash:
    """The parent of a sequence's first block."""
    return _kept_root(fingerprint, salt) if len(salt) <= KEPT_SALT else _root(fingerprint, salt)


def _root(fingerprint: str, salt: str) -> BlockHash:
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"samovar-root")
    for part in (fingerprint.encode(), salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


_kept_root = lru_cache(maxsize=256)(_root)


def extend(parent: BlockHash, ids: Sequence[int]) -> BlockHash:
    """The name of the block that holds `ids` behind `parent`."""
    return hashlib.blake2b(parent + pack_ids(ids), digest_size=HASH_BYTES).digest()


def chain(parent: BlockHash, ids: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> Iterator[BlockHash]:
    """The names of all full blocks of `ids` behind `parent`."""
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        parent = extend(parent, ids[start : start + block_tokens])
        yield parent


def chain_packed(parent: BlockHash, packed: bytes, block_tokens: int = BLOCK_TOKENS) -> list[BlockHash]:
    """The same names, of ids that are packed already: about 1 us a block, a quarter of the time."""
    size = 4 * block_tokens
    names: list[BlockHash] = []
    for start in range(0, len(packed) - size + 1, size):
        parent = hashlib.blake2b(parent + packed[start : start + size], digest_size=HASH_BYTES).digest()
        names.append(parent)
    return names
