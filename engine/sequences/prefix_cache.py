"""The prefix cache: which full KV blocks hold which beginning of a text, and which idle block is reused first.

A block's digest covers its tokens and, through its parent's digest, all tokens before them. The chain begins with a
salt, so that sequences of different salts never share a block. Knows digests and block ids; not sequences, tensors or a
block's holders (`BlockPool`).
"""

from array import array
from collections import OrderedDict
from hashlib import blake2b

DIGEST_BYTES = 32  # long enough to take equal digests for equal tokens: nothing else is compared


def root_digest(salt: str) -> bytes:
    """Return the digest that the first block of a text has as its parent."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"tidegate-kv-root").digest()


def block_digest(parent: bytes, token_ids: "array[int]") -> bytes:
    """Return the digest of a full block that follows the block with digest `parent`."""
    return blake2b(parent + token_ids.tobytes(), digest_size=DIGEST_BYTES).digest()


class PrefixCache:
    """Blocks by digest. A block is idle while no sequence holds it. Only idle blocks are evicted: the lowest retention
    first, and of one retention the least recently used. All operations are O(1) in the number of blocks."""

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
        """Return the block with this digest."""
        return self._block_of.get(digest)

    def add(self, block: int, digest: bytes, retention: int) -> None:
        """Add a block in use. If another block has the digest already, that one stays and `block` is not cached."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self._retention[block] = retention

    def raise_retention(self, block: int, retention: int) -> None:
        """Raise the retention of a block in use, which a sequence of `retention` has found."""
        self._retention[block] = max(self._retention[block], retention)

    def mark_idle(self, block: int) -> None:
        """Note that the block's last holder has released it."""
        self._idle.setdefault(self._retention[block], OrderedDict())[block] = None
        self._num_idle += 1

    def mark_in_use(self, block: int) -> None:
        """Note that the idle block has a holder again."""
        retention = self._retention[block]
        level = self._idle[retention]
        del level[block]
        if not level:
            del self._idle[retention]
        self._num_idle -= 1

    def forget(self, block: int) -> None:
        """Remove a block in use, for example because its contents may be broken."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            del self._retention[block]

    def evict(self) -> int:
        """Remove the idle block to reuse first, and return it. There must be an idle block."""
        block = next(iter(self._idle[min(self._idle)]))
        self.mark_in_use(block)
        self.forget(block)
        return block
