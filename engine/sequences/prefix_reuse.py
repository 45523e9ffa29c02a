"""Gives sequences the cached KV blocks of their prefixes, and adds their full blocks to the prefix cache.

Knows sequences, blocks and digests; does not know plans or tensors.
"""

from collections.abc import Sequence as Seq

from engine.interface import blocks_for
from engine.sequences.block_pool import BlockPool
from engine.sequences.sequence import Sequence


class PrefixReuse:
    """The link between the sequences of a `SequenceTable` and the prefix cache of its block pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def take_for_runs(self, runs: Seq[tuple[Sequence, int]]) -> list[int]:
        """Give cached blocks to the sequences of `runs` that have no KV yet.

        Return the number of cached tokens for each run. Each run is (sequence, planned tokens). Call this before a
        block is allocated for any run: the allocation could evict a cached block that another run is about to find.

        A cached block without a holder counts as free until a sequence takes it. If a sequence finds more such blocks
        than the plan can spare, the sequence takes fewer, so that every run gets the blocks that it was planned with.
        """
        if all(sequence.num_computed_tokens for sequence, _ in runs):
            return [0] * len(runs)
        spare = self._pool.num_free - sum(self._num_planned_blocks(*run) for run in runs)
        num_cached = []
        for sequence, num_tokens in runs:
            blocks = self._find_for_start(sequence)
            if blocks:
                spare -= self._limit(blocks, num_tokens, sequence.num_tokens, spare)
                self._take(sequence, blocks)
                sequence.num_computed_tokens = len(blocks) * self._block_size
            num_cached.append(len(blocks) * self._block_size)
        return num_cached

    def take_for_resume(self, sequence: Sequence) -> None:
        """Give a swapped sequence the full blocks of its computed tokens that are still in the cache."""
        self._take(sequence, self._find(sequence, sequence.num_computed_tokens // self._block_size))

    def add_full_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Add the blocks of the sequence that have become full to the prefix cache.

        `num_computed` is the number of computed tokens of the sequence.
        """
        num_full = num_computed // self._block_size
        if num_full <= sequence.num_known_blocks:
            return
        digests = sequence.digests(num_full, self._block_size)
        for i in range(sequence.num_known_blocks, num_full):
            self._pool.cache.add(sequence.block_table[i], digests[i], sequence.retention)
        sequence.num_known_blocks = num_full

    def _num_planned_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        end = sequence.num_computed_tokens + num_tokens
        return max(0, blocks_for(end, self._block_size) - len(sequence.block_table))

    def _find_for_start(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks that a sequence without KV can start with.

        At least one token is left to compute. A sequence that requests prompt log probabilities finds no blocks.
        """
        if sequence.num_computed_tokens or sequence.sampling.prompt_logprobs is not None:
            return []
        return self._find(sequence, (sequence.num_tokens - 1) // self._block_size)

    def _find(self, sequence: Sequence, limit: int) -> list[int]:
        """Return the longest cached chain of the first blocks of the sequence, at most `limit` blocks."""
        blocks: list[int] = []
        while len(blocks) < limit:
            digest = sequence.digests(len(blocks) + 1, self._block_size)[len(blocks)]
            block = self._pool.cache.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _limit(self, blocks: list[int], num_planned: int, num_known: int, spare: int) -> int:
        """Shorten `blocks`, in place, until taking them costs at most `spare` free blocks; return the cost.

        Blocks are dropped from the end of `blocks`. The cost is the number of free blocks that the run needs if it
        takes `blocks`, minus the number that the run was planned with (`num_planned` tokens to compute, no cached
        blocks). The cost is negative if taking `blocks` saves free blocks. `num_known` is the number of known tokens of
        the sequence, and `spare` is the number of free blocks that the plan can spare.
        """
        size = self._block_size
        num_idle = sum(self._pool.is_idle(block) for block in blocks)
        while True:
            num_left = min(num_planned, num_known - len(blocks) * size)
            extra = num_idle + blocks_for(num_left, size) - blocks_for(num_planned, size)
            if extra <= spare:
                return extra
            num_idle -= self._pool.is_idle(blocks.pop())

    def _take(self, sequence: Sequence, blocks: list[int]) -> None:
        """Fill the empty block table of the sequence with cached blocks, and make the sequence one of their holders."""
        for block in blocks:
            self._pool.share(block, sequence.seq_id)
            self._pool.cache.raise_retention(block, sequence.retention)
        sequence.block_table.extend(blocks)
        sequence.num_known_blocks = len(blocks)
