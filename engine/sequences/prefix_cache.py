"""Which full KV blocks hold which beginning of a text, and which of those that nobody uses go first.

A block's digest covers its tokens and, through its parent's digest, everything before them; the chain begins with a
salt, so that sequences of different salts never meet. Knows digests and block ids; not sequences, not tensors, and
not who uses a block (the `BlockPool` tells it when the last user has left).
"""

from array import array
from collections import OrderedDict
from hashlib import blake2b

DIGEST_BYTES = 32  # equal digests count as equal tokens: nothing else is compared


def root_digest(salt: str) -> bytes:
    """The parent of a text's first block."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"tidegate-kv-root").digest()


def block_digest(parent: bytes, token_ids: "array[int]") -> bytes:
    """The digest of one full block behind `parent`."""
    return blake2b(parent + token_ids.tobytes(), digest_size=DIGEST_BYTES).digest()


class PrefixCache:
    """Blocks by digest. An entry is idle while nobody uses its block; only idle ones are evicted, those of the lowest
    retention first, and the least recently used of them. All operations are O(1) in the number of blocks."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._retention: dict[int, int] = {}
        self._idle: dict[int, OrderedDict[int, None]] = {}  # by retention, least recently used first
        self._num_idle = 0

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def add(self, block: int, digest: bytes, retention: int) -> None:
        """Remember a block in use. Where another one holds the same already, that one stays and this one is let be."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self._retention[block] = retention

    def raise_retention(self, block: int, retention: int) -> None:
        """A block in use was found by a sequence of `retention`."""
        self._retention[block] = max(self._retention[block], retention)

    def rest(self, block: int) -> None:
        """The last user of the block has left."""
        self._idle.setdefault(self._retention[block], OrderedDict())[block] = None
        self._num_idle += 1

    def wake(self, block: int) -> None:
        """The idle block is used again."""
        retention = self._retention[block]
        level = self._idle[retention]
        del level[block]
        if not level:
            del self._idle[retention]
        self._num_idle -= 1

    def forget(self, block: int) -> None:
        """The block in use is not to be found any more: its contents are not to be trusted."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            del self._retention[block]

    def evict(self) -> int:
        """Forget the idle block worth least, and return it. There must be one."""
        block = next(iter(self._idle[min(self._idle)]))
        self.wake(block)
        self.forget(block)
        return block
