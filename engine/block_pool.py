"""Which KV blocks are free. Knows block ids and counts; not who holds a block, nor the tensors behind it."""

from collections.abc import Iterable


class BlockPool:
    """Block ids 0 … num_blocks-1. `num_free + num_used == num_blocks` after every call.

    The free list is a stack: the block freed last is handed out first, so that a lightly loaded engine keeps
    touching the same memory, and what was never needed is never committed.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return sum(self._is_used)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, or none at all: raises `MemoryError` when fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"{count} KV blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_used[block] = 1
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises `ValueError` for one that is not in use: freed twice, it would be shared."""
        for block in blocks:
            if not self._is_used[block]:
                raise ValueError(f"KV block {block} is free already")
            self._is_used[block] = 0
            self._free.append(block)
