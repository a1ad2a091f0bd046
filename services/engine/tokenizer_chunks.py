"""A tokenizer bundle cut into messages of the bus (a real one compresses to some MiB)."""

import hashlib
import zlib

from services.protocol import codec
from services.protocol.events import TokenizerBundle, TokenizerChunk

CHUNK_BYTES = 512 * 1024


class TokenizerChunks:
    """The encoded chunks of one bundle. Building it takes about a second for a vocabulary of 248k: not on the loop."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        data = zlib.compress(codec.encode(bundle), 6)
        self.digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        count = -(-len(data) // CHUNK_BYTES)
        self._messages = [
            codec.encode(TokenizerChunk(self.digest, i, count, data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]))
            for i in range(count)
        ]

    def __len__(self) -> int:
        return len(self._messages)

    def message(self, index: int) -> bytes:
        """An encoded TokenizerChunk. Raises IndexError for an index that is none."""
        if index < 0:
            raise IndexError(index)
        return self._messages[index]
