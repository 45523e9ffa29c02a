"""The prefix cache: it finds the full KV blocks that hold a given prefix, and chooses which idle block is reused first.

A block's digest covers its own tokens and, through the digest of its parent, all tokens before them. The chain of
digests begins with a salt, so sequences with different salts never share a block. Knows digests and block ids; does not
know sequences, tensors or the holders of a block (`BlockPool`).
"""

from array import array
from collections import OrderedDict
from hashlib import blake2b

DIGEST_BYTES = 32  # long enough that equal digests mean equal tokens: the tokens are not compared


def root_digest(salt: str) -> bytes:
    """Return the root of the hash chain of a text: the digest that the first block has in place of a parent's digest.

    Texts with different `salt` share no blocks.
    """
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"tidegate-kv-root").digest()


def block_digest(parent: bytes, token_ids: "array[int]") -> bytes:
    """Return the digest of a full block with these tokens. `parent` is the digest of the block before it."""
    return blake2b(parent + token_ids.tobytes(), digest_size=DIGEST_BYTES).digest()


class PrefixCache:
    """The cached blocks by their digests.

    A block is idle while no sequence holds it. Only idle blocks are evicted: those of the lowest retention first, and
    among equal retentions the least recently used first. All operations take O(1) time in the number of blocks.
    """

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
        """Return the block with this digest; None if there is none."""
        return self._block_of.get(digest)

    def add(self, block: int, digest: bytes, retention: int) -> None:
        """Add a block in use.

        If another block already has this digest, the other block stays in the cache and `block` is not added.
        """
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self._retention[block] = retention

    def raise_retention(self, block: int, retention: int) -> None:
        """Raise the retention of a block in use to at least `retention`.

        `retention` is the retention of a sequence that has found the block.
        """
        self._retention[block] = max(self._retention[block], retention)

    def mark_idle(self, block: int) -> None:
        """Record that the last holder of the block has released it."""
        self._idle.setdefault(self._retention[block], OrderedDict())[block] = None
        self._num_idle += 1

    def mark_in_use(self, block: int) -> None:
        """Record that the idle block has a holder again."""
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
        """Remove the idle block that is to be reused first, and return it. There must be an idle block."""
        block = next(iter(self._idle[min(self._idle)]))
        self.mark_in_use(block)
        self.forget(block)
        return block
