"""All sequences of an engine and the blocks they hold: what a plan may do to them, and doing it.

Knows sequences, blocks and the rules of a `StepPlan`; not tensors, not sampling. `check` reads, the others
write: a refused plan leaves no trace.
"""

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.interface import (
    EngineInfo,
    FinishReason,
    NewSequence,
    PlanError,
    Preempt,
    PreemptionMode,
    Run,
    StepPlan,
    blocks_for,
)
from engine.sequence import Sequence, SequenceStatus

# mode: (from which states, into which). Evicting a paused sequence reclaims its memory.
_PREEMPTIONS = {
    PreemptionMode.PAUSE: ({SequenceStatus.ACTIVE}, SequenceStatus.PAUSED),
    PreemptionMode.RECOMPUTE: ({SequenceStatus.ACTIVE, SequenceStatus.PAUSED}, SequenceStatus.EVICTED),
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One `Run`, with its blocks in place: tokens `start … start + num_tokens - 1` of `sequence`."""

    sequence: Sequence
    start: int
    num_tokens: int
    unfilled_block: int | None = None  # a block new to the sequence, of which the chunk leaves slots unwritten

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Catches up with the known tokens, so a new one is sampled."""
        return self.end == self.sequence.num_tokens


@dataclass(slots=True)
class _Foreseen:
    """A sequence as it will be when the plan's runs begin."""

    status: SequenceStatus
    num_uncomputed: int
    num_computed: int
    num_blocks: int


class SequenceTable:
    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self.pool = BlockPool(info.num_blocks)
        self._sequences: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, seq_id: str) -> Sequence:
        return self._sequences[seq_id]

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._sequences

    # --- reading -----------------------------------------------------------------------------------------

    def check(self, plan: StepPlan) -> None:
        """Raises `PlanError` for the first rule that `plan`, executed in order, would break."""
        if plan.num_tokens > self._info.max_step_tokens:
            raise PlanError(f"{plan.num_tokens} tokens in a step, at most {self._info.max_step_tokens} allowed")
        foreseen: dict[str, _Foreseen | None] = {}  # None: gone
        num_free = self.pool.num_free
        for seq_id in plan.abort:
            num_free += self._foresee(seq_id, foreseen).num_blocks
            foreseen[seq_id] = None
        for preempt in plan.preempt:
            num_free += self._check_preempt(preempt, self._foresee(preempt.seq_id, foreseen))
        for seq_id in plan.resume:
            sequence = self._foresee(seq_id, foreseen)
            if sequence.status is SequenceStatus.ACTIVE:
                raise PlanError(f"{seq_id} is not preempted and cannot be resumed")
            sequence.status = SequenceStatus.ACTIVE
        for new in plan.start:
            if foreseen.get(new.seq_id) or (new.seq_id not in foreseen and new.seq_id in self):
                raise PlanError(f"{new.seq_id} exists already")
            self._check_new(new)
            foreseen[new.seq_id] = _Foreseen(SequenceStatus.ACTIVE, len(new.prompt_token_ids), 0, 0)
        num_needed = self._check_runs(plan.run, foreseen)
        if num_needed > num_free:
            raise PlanError(f"the plan needs {num_needed} KV blocks and {num_free} are free")

    def _foresee(self, seq_id: str, foreseen: dict[str, _Foreseen | None]) -> _Foreseen:
        if seq_id not in foreseen and seq_id in self._sequences:
            s = self._sequences[seq_id]
            foreseen[seq_id] = _Foreseen(s.status, s.num_uncomputed_tokens, s.num_computed_tokens, len(s.block_table))
        sequence = foreseen.get(seq_id)
        if sequence is None:
            raise PlanError(f"there is no sequence {seq_id}")
        return sequence

    def _check_preempt(self, preempt: Preempt, sequence: _Foreseen) -> int:
        """The number of blocks that it frees."""
        if preempt.mode.value not in self._info.preemption_modes or preempt.mode not in _PREEMPTIONS:
            raise PlanError(f"this engine cannot preempt by {preempt.mode.value}")
        sources, target = _PREEMPTIONS[preempt.mode]
        if sequence.status not in sources:
            raise PlanError(f"{preempt.seq_id} is {sequence.status.value}: no preemption by {preempt.mode.value}")
        sequence.status = target
        if target is not SequenceStatus.EVICTED:
            return 0
        freed, sequence.num_blocks = sequence.num_blocks, 0
        sequence.num_uncomputed += sequence.num_computed
        sequence.num_computed = 0
        return freed

    def _check_new(self, new: NewSequence) -> None:
        num_prompt = len(new.prompt_token_ids)
        if not 1 <= num_prompt < self._info.max_model_len:
            raise PlanError(f"{new.seq_id}: a prompt of {num_prompt} tokens, not 1 … {self._info.max_model_len - 1}")
        if new.sampling.max_tokens < 1:
            raise PlanError(f"{new.seq_id}: max_tokens is {new.sampling.max_tokens}, not at least 1")
        if min(new.prompt_token_ids) < 0 or max(new.prompt_token_ids) >= self._info.vocab_size:
            raise PlanError(f"{new.seq_id}: a token id outside the vocabulary of {self._info.vocab_size}")

    def _check_runs(self, runs: tuple[Run, ...], foreseen: dict[str, _Foreseen | None]) -> int:
        """The number of blocks that the runs take."""
        seen: set[str] = set()
        num_needed = 0
        for run in runs:
            sequence = self._foresee(run.seq_id, foreseen)
            if run.seq_id in seen:
                raise PlanError(f"{run.seq_id} is run twice")
            if sequence.status is not SequenceStatus.ACTIVE:
                raise PlanError(f"{run.seq_id} is {sequence.status.value} and cannot be run")
            if not 1 <= run.num_tokens <= sequence.num_uncomputed:
                raise PlanError(f"{run.seq_id}: {run.num_tokens} tokens of {sequence.num_uncomputed} uncomputed")
            seen.add(run.seq_id)
            num_needed += self._num_missing(sequence.num_computed + run.num_tokens, sequence.num_blocks)
        return num_needed

    def _num_missing(self, num_tokens: int, num_blocks: int) -> int:
        return max(0, blocks_for(num_tokens, self._info.block_size) - num_blocks)

    # --- writing: only after `check` ---------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> list[Chunk]:
        """Abort, preempt, resume, start, and allocate blocks for the runs."""
        for seq_id in plan.abort:
            self.remove(seq_id)
        for preempt in plan.preempt:
            self._preempt(self._sequences[preempt.seq_id], preempt.mode)
        for seq_id in plan.resume:
            self._sequences[seq_id].status = SequenceStatus.ACTIVE
        for new in plan.start:
            self._sequences[new.seq_id] = Sequence(new, self._info.max_model_len, self._info.eos_token_ids)
        return [self._reserve(run) for run in plan.run]

    def advance(self, chunk: Chunk, token_id: int | None) -> FinishReason | None:
        """Take in what a chunk did; a finished sequence is removed at once."""
        sequence = chunk.sequence
        sequence.num_computed_tokens = chunk.end
        reason = None if token_id is None else sequence.append(token_id)
        if reason is not None:
            self.remove(sequence.seq_id)
        return reason

    def remove(self, seq_id: str) -> None:
        self._free_blocks(self._sequences.pop(seq_id))

    def _preempt(self, sequence: Sequence, mode: PreemptionMode) -> None:
        sequence.status = _PREEMPTIONS[mode][1]
        if sequence.status is SequenceStatus.EVICTED:
            self._free_blocks(sequence)
            sequence.num_computed_tokens = 0

    def _reserve(self, run: Run) -> Chunk:
        sequence = self._sequences[run.seq_id]
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + run.num_tokens
        missing = self._num_missing(end, len(sequence.block_table))
        if not missing:
            return Chunk(sequence, start, run.num_tokens)
        sequence.block_table.extend(self.pool.allocate(missing))
        unfilled = sequence.block_table[-1] if end % self._info.block_size else None
        return Chunk(sequence, start, run.num_tokens, unfilled)

    def _free_blocks(self, sequence: Sequence) -> None:
        # Last block first: the stack then hands them out again in the order of the table.
        self.pool.free(reversed(sequence.block_table))
        del sequence.block_table[:]
