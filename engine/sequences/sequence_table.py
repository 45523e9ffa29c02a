"""All sequences of an engine and their blocks, on the device and in host memory, and how a plan changes them.

Knows sequences, blocks and the order of a `StepPlan`; does not know tensors or sampling. `check` only reads, so that a
refused plan changes nothing; the other methods write.

Only full blocks are shared, and a full block is never written again: tokens are appended, and a recomputed sequence
begins after the full blocks that it finds in the cache. So copy-on-write is not needed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from engine.interface import (
    EngineInfo,
    FinishReason,
    PreemptionMode,
    Run,
    SequenceFailure,
    SequenceOutput,
    StepPlan,
    blocks_for,
)
from engine.sequences.block_pool import BlockPool
from engine.sequences.chunk import Chunk, Outcome, output_of
from engine.sequences.plan_validation import PREEMPTIONS, PlanCheck
from engine.sequences.prefix_reuse import PrefixReuse
from engine.sequences.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class BlockCopies:
    """The blocks to copy before the chunks of a step are computed: first those in `out`, then those in `back`."""

    out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    back: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)

    def __len__(self) -> int:
        return len(self.out) + len(self.back)


class SequenceTable:
    """The owner of all sequences. Its pools `pool` and `swap_pool` record which blocks are free."""

    def __init__(self, info: EngineInfo, *, prefix_cache: bool = False) -> None:
        self._info = info
        self.pool = BlockPool(info.num_blocks)
        self._prefixes = PrefixReuse(self.pool, info.block_size) if prefix_cache else None
        self.swap_pool = BlockPool(info.num_swap_blocks)
        self.copies = BlockCopies()  # of the newest step
        self.suspended: list[Chunk] = []  # the chunks of the suspended step
        self._sequences: dict[str, Sequence] = {}

    def __getitem__(self, seq_id: str) -> Sequence:
        return self._sequences[seq_id]

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._sequences

    def check(self, plan: StepPlan) -> None:
        """Check `plan` in the order of its execution. Raises `PlanError` for the first rule that the plan breaks."""
        suspended = frozenset(chunk.sequence.seq_id for chunk in self.suspended)
        PlanCheck(self._info, self._sequences, self.pool, self.swap_pool, suspended).run(plan)

    def without_ended(self, plan: StepPlan) -> StepPlan:
        """Return a plan with `ahead` as it must be executed, now that more is known (`StepPlan.ahead`)."""
        starting = {new.seq_id for new in plan.start}
        runs = []
        for run in plan.run:
            sequence = self._sequences.get(run.seq_id)
            if run.seq_id in starting:
                runs.append(run)
            elif sequence is not None:
                left = sequence.num_uncomputed_tokens
                runs.append(run if run.num_tokens <= left else Run(run.seq_id, left))
        preempt = tuple(preempt for preempt in plan.preempt if preempt.seq_id in self._sequences)
        return replace(plan, preempt=preempt, run=tuple(runs))

    # --- methods that write: only after `check` ----------------------------------------------------------

    def begin(self, plan: StepPlan) -> list[Chunk]:
        """Abort, preempt, resume and start sequences; then take cached blocks and allocate new blocks for the runs.

        Return the chunks to compute. The blocks listed in `copies` must be copied before the chunks are computed.
        """
        self.copies = BlockCopies()
        for seq_id in plan.abort:
            self.free(seq_id)
        for preempt in plan.preempt:
            self._preempt(self._sequences[preempt.seq_id], preempt.mode)
        for seq_id in plan.resume:
            self._resume(self._sequences[seq_id])
        for new in plan.start:
            self._sequences[new.seq_id] = Sequence(new, self._info.max_model_len, self._info.eos_token_ids)
        num_cached = self._take_cached(plan.run)
        return [self._allocate(run, cached) for run, cached in zip(plan.run, num_cached, strict=True)]

    def advance(self, chunk: Chunk, token_ids: tuple[int, ...]) -> FinishReason | None:
        """Record that the chunk was computed, and append the tokens that it sampled, if any.

        If the sequence is finished, free it and return why it is finished. Return None if the sequence continues. What
        the chunk has computed of a draft beyond these tokens does not count, and its blocks are freed.
        """
        sequence, end = chunk.sequence, chunk.num_computed(token_ids)
        if scored := chunk.scored:
            sequence.num_scored_tokens = scored.stop
        sequence.num_computed_tokens = end
        reason = None
        for token_id in token_ids:
            reason = sequence.append(token_id)
        if self._prefixes is not None:
            self._prefixes.add_full_blocks(sequence, end)
        if chunk.draft:
            self._free_beyond(sequence, end)
        if reason is not None:
            self.free(sequence.seq_id)
        return reason

    def drop_suspended(self) -> tuple[SequenceOutput, ...]:
        """Undo the chunks of the suspended step, and return what is left of them.

        The blocks allocated for the chunks are freed. Tokens and blocks that a sequence took from the prefix cache
        stay.
        """
        chunks, self.suspended = self.suspended, []
        for chunk in chunks:
            self._free_beyond(chunk.sequence, chunk.start)
        return tuple(SequenceOutput(c.sequence.seq_id, c.start, num_cached_tokens=c.num_cached) for c in chunks)

    def launch(self, chunk: Chunk, placeholder: int | None) -> None:
        """Do the first half of `advance` while the device computes the chunk.

        The next plan can then continue the sequence. `placeholder` stands for the token that the chunk samples; None if
        the chunk samples no token.
        """
        chunk.sequence.num_computed_tokens = chunk.end
        if placeholder is not None:
            chunk.sequence.token_ids.append(placeholder)

    def finalize(self, chunk: Chunk, token_id: int | None) -> FinishReason | None:
        """Do the second half of `advance`, after the device has computed the chunk and the sampled token is known.

        Return why the sequence is finished; None if the sequence continues.
        """
        sequence = chunk.sequence
        reason = None if token_id is None else sequence.replace_placeholder(chunk.end, token_id)
        if self._prefixes is not None:
            self._prefixes.add_full_blocks(sequence, chunk.end)
        if reason is not None:
            self.free(sequence.seq_id)
        return reason

    def finalize_all(
        self, chunks: Iterable[Chunk], outcomes: Mapping[str, Outcome]
    ) -> tuple[list[SequenceOutput], list[SequenceFailure]]:
        """Finalize the chunks of a launched step, by their outcomes; free the sequences that failed.

        A sequence that ended in the previous step has no output here. It was run once more, because this step was
        launched before the end of the sequence was known.
        """
        outputs: list[SequenceOutput] = []
        failures: list[SequenceFailure] = []
        for chunk in chunks:
            if not self.holds(chunk.sequence):
                continue
            seq_id = chunk.sequence.seq_id
            outcome = outcomes[seq_id]
            if outcome.failure is not None:
                self.free_broken(seq_id)
                failures.append(SequenceFailure(seq_id, outcome.failure))
            else:
                outputs.append(output_of(chunk, outcome, self.finalize(chunk, outcome.token_id)))
        return outputs, failures

    def holds(self, sequence: Sequence) -> bool:
        """Return whether the table holds this sequence: it is not finished, aborted or failed."""
        return self._sequences.get(sequence.seq_id) is sequence

    def free(self, seq_id: str) -> None:
        """Release the blocks of a sequence and remove the sequence from the table."""
        sequence = self._sequences.pop(seq_id)
        self._free_blocks(sequence)
        self._free_swapped(sequence)

    def free_broken(self, seq_id: str) -> None:
        """Free a sequence whose KV may be broken, and remove its blocks from the prefix cache."""
        for block in self._sequences[seq_id].block_table:
            self.pool.cache.forget(block)
        self.free(seq_id)

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
        if self._prefixes is not None:
            self._prefixes.take_for_resume(sequence)
        num_found = len(sequence.block_table)
        sequence.block_table.extend(self.pool.allocate(num_blocks - num_found, sequence.seq_id))
        self.copies.back += zip(sequence.swap_table[num_found:], sequence.block_table[num_found:], strict=True)
        self._free_swapped(sequence)

    def _take_cached(self, runs: tuple[Run, ...]) -> list[int]:
        """Take cached blocks for the runs. Return, for each run, the number of tokens that are in these blocks."""
        if self._prefixes is None:
            return [0] * len(runs)
        planned = [(self._sequences[run.seq_id], run.num_tokens + len(run.draft)) for run in runs]
        return self._prefixes.take_for_runs(planned)

    def _allocate(self, run: Run, num_cached: int) -> Chunk:
        sequence = self._sequences[run.seq_id]
        start = sequence.num_computed_tokens
        num_tokens = min(run.num_tokens, sequence.num_tokens - start)
        end = start + num_tokens + len(run.draft)
        missing = blocks_for(end, self._info.block_size) - len(sequence.block_table)
        if missing <= 0:
            return Chunk(sequence, start, num_tokens, num_cached=num_cached, draft=run.draft)
        sequence.block_table.extend(self.pool.allocate(missing, sequence.seq_id))
        unfilled = sequence.block_table[-1] if end % self._info.block_size else None
        return Chunk(sequence, start, num_tokens, unfilled, num_cached, run.draft)

    def _free_blocks(self, sequence: Sequence) -> None:
        # Free the last block first. The pool then allocates the blocks again in the order of the table, and the prefix
        # cache evicts the end of a text before its prefix.
        self.pool.free(reversed(sequence.block_table), sequence.seq_id)
        del sequence.block_table[:]
        sequence.num_known_blocks = 0

    def _free_beyond(self, sequence: Sequence, num_tokens: int) -> None:
        """Free the blocks of the sequence that its first `num_tokens` tokens do not need."""
        kept = blocks_for(num_tokens, self._info.block_size)
        self.pool.free(reversed(sequence.block_table[kept:]), sequence.seq_id)
        del sequence.block_table[kept:]

    def _free_swapped(self, sequence: Sequence) -> None:
        self.swap_pool.free(sequence.swap_table, sequence.seq_id)
        sequence.swap_table = []
