"""Gives sequences the cached KV blocks of their beginning, and adds their full blocks to the prefix cache.

Knows sequences, blocks and digests; not plans or tensors.
"""

from collections.abc import Sequence as Seq

from engine.interface import blocks_for
from engine.sequences.block_pool import BlockPool
from engine.sequences.sequence import Sequence


class PrefixReuse:
    """The prefix cache of one block pool, as the `SequenceTable` uses it."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def take_for_runs(self, runs: Seq[tuple[Sequence, int]]) -> list[int]:
        """Give cached blocks to the sequences without KV, before any of `runs`, (sequence, planned tokens), allocates
        one: an allocation could evict a block that another run is about to find. Return each run's cached tokens.

        A cached block without a holder is free until it is taken. If a first chunk finds more of them than the plan can
        spare, it takes fewer: every run keeps the blocks that it was planned with.
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
        """Give a swapped sequence the full blocks of its computed tokens that are still cached."""
        self._take(sequence, self._find(sequence, sequence.num_computed_tokens // self._block_size))

    def add_full_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Add the blocks that have become full to the prefix cache: their contents are computed now."""
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
        """Return cached blocks for a sequence without KV; at least one token is left to compute."""
        if sequence.num_computed_tokens or sequence.sampling.prompt_logprobs is not None:
            return []
        return self._find(sequence, (sequence.num_tokens - 1) // self._block_size)

    def _find(self, sequence: Sequence, limit: int) -> list[int]:
        """Return the longest cached chain of the sequence's first blocks, at most `limit`."""
        blocks: list[int] = []
        while len(blocks) < limit:
            digest = sequence.digests(len(blocks) + 1, self._block_size)[len(blocks)]
            block = self._pool.cache.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _limit(self, blocks: list[int], num_planned: int, num_known: int, spare: int) -> int:
        """Drop the last of `blocks` until taking them needs at most `spare` free blocks more than the planned run of
        `num_planned` tokens. Return that number; it is negative if taking them needs fewer."""
        size = self._block_size
        num_idle = sum(self._pool.is_idle(block) for block in blocks)
        while True:
            num_left = min(num_planned, num_known - len(blocks) * size)
            extra = num_idle + blocks_for(num_left, size) - blocks_for(num_planned, size)
            if extra <= spare:
                return extra
            num_idle -= self._pool.is_idle(blocks.pop())

    def _take(self, sequence: Sequence, blocks: list[int]) -> None:
        """Begin the sequence's empty block table with cached blocks."""
        for block in blocks:
            self._pool.share(block, sequence.seq_id)
            self._pool.cache.raise_retention(block, sequence.retention)
        sequence.block_table.extend(blocks)
        sequence.num_known_blocks = len(blocks)
