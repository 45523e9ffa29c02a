"""All sequences of an engine and the blocks they hold, on the device and in host memory: what a plan does to them.

Knows sequences, blocks and the order of a `StepPlan`; not tensors, not sampling. `check` reads, the others write: a
refused plan leaves no trace.

Only full blocks are ever shared, and a full block is never written again: tokens are appended, and a sequence that is
computed again begins behind the full blocks it has found. So there is no copy on write.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.interface import EngineInfo, FinishReason, PreemptionMode, Run, StepPlan, blocks_for
from engine.sequences.block_pool import BlockPool
from engine.sequences.plan_validation import PREEMPTIONS, PlanCheck
from engine.sequences.sequence import Sequence, SequenceStatus

_NONE_SCORED = range(0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One `Run`, with its blocks in place: tokens `start … start + num_tokens - 1` of `sequence`. The `num_cached`
    tokens before `start` were found in the prefix cache just now."""

    sequence: Sequence
    start: int
    num_tokens: int
    unfilled_block: int | None = None  # a block new to the sequence, of which the chunk leaves slots unwritten
    num_cached: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Catches up with the known tokens, so a new one is sampled."""
        return self.end == self.sequence.num_tokens

    @property
    def scored(self) -> range:
        """Positions of the prompt tokens that follow the chunk's and whose log probabilities are still to be told."""
        sequence = self.sequence
        if sequence.sampling.prompt_logprobs is None:
            return _NONE_SCORED
        return range(max(self.start + 1, sequence.num_scored_tokens), min(self.end + 1, sequence.num_prompt_tokens))


@dataclass(slots=True)
class BlockCopies:
    """What has to be copied before a step's chunks are computed: first `out`, then `back`."""

    out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    back: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)

    def __len__(self) -> int:
        return len(self.out) + len(self.back)


class SequenceTable:
    def __init__(self, info: EngineInfo, *, prefix_cache: bool = False) -> None:
        self._info = info
        self._caches = prefix_cache
        self.pool = BlockPool(info.num_blocks)
        self.swap_pool = BlockPool(info.num_swap_blocks)
        self.copies = BlockCopies()  # of the step begun last
        self._sequences: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, seq_id: str) -> Sequence:
        return self._sequences[seq_id]

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._sequences

    def check(self, plan: StepPlan) -> None:
        """Raises `PlanError` for the first rule that `plan`, executed in order, would break."""
        PlanCheck(self._info, self._sequences, self.pool, self.swap_pool).run(plan)

    # --- writing: only after `check` ---------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> list[Chunk]:
        """Abort, preempt, resume, start, take what is cached, and allocate blocks for the runs. `copies` says what to
        copy before the chunks are computed."""
        self.copies = BlockCopies()
        for seq_id in plan.abort:
            self.remove(seq_id)
        for preempt in plan.preempt:
            self._preempt(self._sequences[preempt.seq_id], preempt.mode)
        for seq_id in plan.resume:
            self._resume(self._sequences[seq_id])
        for new in plan.start:
            self._sequences[new.seq_id] = Sequence(new, self._info.max_model_len, self._info.eos_token_ids)
        num_cached = self._take_cached(plan.run)
        return [self._reserve(run, cached) for run, cached in zip(plan.run, num_cached, strict=True)]

    def advance(self, chunk: Chunk, token_id: int | None) -> FinishReason | None:
        """Take in what a chunk did; a finished sequence is removed at once."""
        sequence, end = chunk.sequence, chunk.end
        if scored := chunk.scored:
            sequence.num_scored_tokens = scored.stop
        sequence.num_computed_tokens = end
        if self._caches:
            self._remember(sequence, end)
        reason = None if token_id is None else sequence.append(token_id)
        if reason is not None:
            self.remove(sequence.seq_id)
        return reason

    def evict_from_step(self, chunk: Chunk) -> None:
        """Undo the chunk of a sequence that was evicted from the running step: free the blocks that were allocated for
        the chunk. Tokens and blocks that the sequence found in the prefix cache stay."""
        sequence = chunk.sequence
        kept = blocks_for(chunk.start, self._info.block_size)
        self.pool.free(reversed(sequence.block_table[kept:]), sequence.seq_id)
        del sequence.block_table[kept:]

    def launch(self, chunk: Chunk, placeholder: int | None) -> None:
        """Do the first half of `advance` while the device computes the chunk, so that the next plan can go on from it.
        `placeholder` stands for the token that the chunk samples; None if it samples none."""
        chunk.sequence.num_computed_tokens = chunk.end
        if placeholder is not None:
            chunk.sequence.append_placeholder(placeholder)

    def finalize(self, chunk: Chunk, token_id: int | None) -> FinishReason | None:
        """Do the second half of `advance`: the device has computed the chunk, and its token is known."""
        sequence = chunk.sequence
        reason = None if token_id is None else sequence.replace_placeholder(chunk.end, token_id)
        if self._caches:
            self._remember(sequence, chunk.end)
        if reason is not None:
            self.remove(sequence.seq_id)
        return reason

    def holds(self, sequence: Sequence) -> bool:
        """It has not ended."""
        return self._sequences.get(sequence.seq_id) is sequence

    def remove(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id)
        self._free_blocks(sequence)
        self._free_swapped(sequence)

    def discard(self, seq_id: str) -> None:
        """Remove a sequence whose KV may be broken: nobody finds any of it again."""
        for block in self._sequences[seq_id].block_table:
            self.pool.cache.forget(block)
        self.remove(seq_id)

    def _preempt(self, sequence: Sequence, mode: PreemptionMode) -> None:
        sequence.status = PREEMPTIONS[mode][1]
        if mode is PreemptionMode.PAUSE:
            return
        if mode is PreemptionMode.SWAP:
            sequence.swap_table = self.swap_pool.allocate(len(sequence.block_table), sequence.seq_id)
            self.copies.out += zip(sequence.block_table, sequence.swap_table, strict=True)
        else:
            sequence.num_computed_tokens = 0
        self._free_blocks(sequence)

    def _resume(self, sequence: Sequence) -> None:
        swapped, sequence.status = sequence.status is SequenceStatus.SWAPPED, SequenceStatus.ACTIVE
        if not swapped:
            return
        num_blocks = len(sequence.swap_table)
        if self._caches:
            self._hold(sequence, self._find_cached(sequence, sequence.num_computed_tokens // self._info.block_size))
        num_found = len(sequence.block_table)
        sequence.block_table.extend(self.pool.allocate(num_blocks - num_found, sequence.seq_id))
        self.copies.back += zip(sequence.swap_table[num_found:], sequence.block_table[num_found:], strict=True)
        self._free_swapped(sequence)

    def _reserve(self, run: Run, num_cached: int) -> Chunk:
        sequence = self._sequences[run.seq_id]
        start = sequence.num_computed_tokens
        num_tokens = min(run.num_tokens, sequence.num_uncomputed_tokens)
        end = start + num_tokens
        missing = blocks_for(end, self._info.block_size) - len(sequence.block_table)
        if missing <= 0:
            return Chunk(sequence, start, num_tokens, num_cached=num_cached)
        sequence.block_table.extend(self.pool.allocate(missing, sequence.seq_id))
        unfilled = sequence.block_table[-1] if end % self._info.block_size else None
        return Chunk(sequence, start, num_tokens, unfilled, num_cached)

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, blocks_for(num_tokens, self._info.block_size) - len(sequence.block_table))

    def _free_blocks(self, sequence: Sequence) -> None:
        # Last block first: the stack then hands them out again in the order of the table, and of what stays cached
        # the ends of texts are evicted before their beginnings.
        self.pool.free(reversed(sequence.block_table), sequence.seq_id)
        del sequence.block_table[:]
        sequence.num_known_blocks = 0

    def _free_swapped(self, sequence: Sequence) -> None:
        self.swap_pool.free(sequence.swap_table, sequence.seq_id)
        sequence.swap_table = []

    # --- the prefix cache --------------------------------------------------------------------------------

    def _take_cached(self, runs: Seq[Run]) -> list[int]:
        """Give sequences without KV what is cached of them; the tokens of each run's. Before any run allocates, so that
        nothing is evicted that another run is about to find.

        A cached block that nobody holds is free until it is taken. Where a first chunk finds more of them than the
        plan has blocks to spare, it takes fewer: every run keeps the blocks that it was planned with.
        """
        if not self._caches or all(self._sequences[run.seq_id].num_computed_tokens for run in runs):
            return [0] * len(runs)
        spare = self.pool.num_free - sum(self._num_planned(run) for run in runs)
        num_cached = []
        for run in runs:
            sequence = self._sequences[run.seq_id]
            blocks = self._find_for_start(sequence)
            if blocks:
                spare -= self._shorten(blocks, run, sequence.num_tokens, spare)
                self._hold(sequence, blocks)
                sequence.num_computed_tokens = len(blocks) * self._info.block_size
            num_cached.append(len(blocks) * self._info.block_size)
        return num_cached

    def _num_planned(self, run: Run) -> int:
        sequence = self._sequences[run.seq_id]
        return self._num_missing(sequence, sequence.num_computed_tokens + run.num_tokens)

    def _find_for_start(self, sequence: Sequence) -> list[int]:
        if sequence.num_computed_tokens or sequence.sampling.prompt_logprobs is not None:
            return []
        return self._find_cached(sequence, (sequence.num_tokens - 1) // self._info.block_size)

    def _find_cached(self, sequence: Sequence, limit: int) -> list[int]:
        """The longest cached chain of the sequence's first blocks, at most `limit`."""
        blocks: list[int] = []
        while len(blocks) < limit:
            digest = sequence.digests(len(blocks) + 1, self._info.block_size)[len(blocks)]
            block = self.pool.cache.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _shorten(self, blocks: list[int], run: Run, num_tokens: int, spare: int) -> int:
        """Drop the last of `blocks` until taking them costs at most `spare` more than the run was planned with; that
        difference (below zero where it costs less)."""
        size = self._info.block_size
        num_idle = sum(self.pool.is_idle(block) for block in blocks)
        while True:
            left = min(run.num_tokens, num_tokens - len(blocks) * size)
            extra = num_idle + blocks_for(left, size) - blocks_for(run.num_tokens, size)
            if extra <= spare:
                return extra
            num_idle -= self.pool.is_idle(blocks.pop())

    def _hold(self, sequence: Sequence, blocks: list[int]) -> None:
        """Begin the sequence's table with cached blocks."""
        for block in blocks:
            self.pool.share(block, sequence.seq_id)
            self.pool.cache.raise_retention(block, sequence.retention)
        sequence.block_table.extend(blocks)
        sequence.num_known_blocks = len(blocks)

    def _remember(self, sequence: Sequence, num_computed: int) -> None:
        """Let the blocks that have become full be found: now their contents are computed."""
        size = self._info.block_size
        num_full = num_computed // size
        if num_full <= sequence.num_known_blocks:
            return
        digests = sequence.digests(num_full, size)
        for i in range(sequence.num_known_blocks, num_full):
            self.pool.cache.add(sequence.block_table[i], digests[i], sequence.retention)
        sequence.num_known_blocks = num_full
