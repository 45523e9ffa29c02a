"""The KV blocks of an engine: which blocks are free, and which holders each used block has.

Knows block ids and names of holders; does not know what a holder is, or the tensors of a block. A full block may have
several holders. A full block is never written again, so copy-on-write is not needed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.sequences.prefix_cache import PrefixCache


class BlockPool:
    """The pool of the blocks with ids 0 … num_blocks-1.

    `num_free + num_used == num_blocks` after every call: a block with several holders counts once, and a cached block
    without a holder counts as free.

    The free list is a stack: the block freed last is allocated first. So a lightly loaded engine keeps using the same
    memory, and memory that was never needed is never committed. If the free list is empty, cached blocks without a
    holder are allocated.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.cache = PrefixCache()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holder: list[str | None] = [None] * num_blocks  # by block: its only holder; None: no holder, or several
        self._sharers: dict[int, set[str]] = {}  # by block: its holders, if there are two or more
        self._num_shared: Counter[str] = Counter()  # by holder: number of its blocks that others hold as well
        self._changed: set[str] = set()  # holders whose `_num_shared` has changed since `take_changes`

    @property
    def num_free(self) -> int:
        return len(self._free) + self.cache.num_idle

    @property
    def num_used(self) -> int:
        """The number of blocks that have a holder. Computing it takes O(num_blocks) time."""
        return sum(holder is not None for holder in self._holder) + len(self._sharers)

    def is_idle(self, block: int) -> bool:
        """Return whether the block has no holder."""
        return self._holder[block] is None and block not in self._sharers

    def allocate(self, count: int, holder: str) -> list[int]:
        """Allocate `count` blocks for `holder` and return them. Their contents are unknown.

        Raises `MemoryError`, and allocates no block, if fewer than `count` blocks are free.
        """
        if count > self.num_free:
            raise MemoryError(f"{count} KV blocks are wanted and {self.num_free} are free")
        taken = [self._free.pop() if self._free else self.cache.evict() for _ in range(count)]
        for block in taken:
            self._holder[block] = holder
        return taken

    def share(self, block: int, holder: str) -> None:
        """Add `holder` to the present holders of a cached block."""
        first = self._holder[block]
        if block in self._sharers:
            self._sharers[block].add(holder)
            self._count_shared(holder, 1)
        elif first is None:
            self.cache.mark_in_use(block)
            self._holder[block] = holder
        else:
            self._sharers[block], self._holder[block] = {first, holder}, None
            self._count_shared(first, 1)
            self._count_shared(holder, 1)

    def free(self, blocks: Iterable[int], holder: str) -> None:
        """Release blocks that `holder` holds. A block becomes free if it has no other holder.

        Raises `ValueError` if `holder` does not hold a block: a block that is freed twice would be allocated twice.
        """
        for block in blocks:
            if block in self._sharers:
                self._release_shared(block, holder)
            elif self._holder[block] != holder:
                raise ValueError(f"KV block {block} is not held by {holder}")
            else:
                self._holder[block] = None
                if block in self.cache:
                    self.cache.mark_idle(block)
                else:
                    self._free.append(block)

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """Return how many blocks become free if the holders of the block tables `tables` release all their blocks."""
        released = Counter(block for table in tables for block in table)
        return sum(count == len(self._sharers.get(block, (None,))) for block, count in released.items())

    def take_changes(self) -> tuple[tuple[str, int], ...]:
        """Return the holders whose number of shared blocks has changed since the last call.

        Each item is (holder, number of its blocks that others hold as well).
        """
        if not self._changed:
            return ()
        changes = tuple((holder, self._num_shared[holder]) for holder in sorted(self._changed))
        self._changed.clear()
        return changes

    def _release_shared(self, block: int, holder: str) -> None:
        sharers = self._sharers[block]
        if holder not in sharers:
            raise ValueError(f"KV block {block} is not held by {holder}")
        sharers.remove(holder)
        self._count_shared(holder, -1)
        if len(sharers) == 1:
            (last,) = sharers
            del self._sharers[block]
            self._holder[block] = last
            self._count_shared(last, -1)

    def _count_shared(self, holder: str, change: int) -> None:
        self._num_shared[holder] += change
        if not self._num_shared[holder]:
            del self._num_shared[holder]
        self._changed.add(holder)
