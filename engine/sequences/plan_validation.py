"""The rules of a `StepPlan`. An engine refuses a plan that breaks a rule.

This module reads sequences and pools, and changes nothing. The check goes through the plan in the order of execution,
on copies of the sequences that the plan changes. It ignores the prefix cache: a plan that passes has enough blocks even
if no block is found in the cache.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from engine.interface import EngineInfo, NewSequence, PlanError, Preempt, PreemptionMode, Run, StepPlan, blocks_for
from engine.sequences.block_pool import BlockPool
from engine.sequences.sequence import Sequence, SequenceStatus

# mode: (allowed statuses before, status after). A paused sequence can be preempted again by swapping or recomputing,
# which frees its KV blocks.
_ON_DEVICE = frozenset({SequenceStatus.ACTIVE, SequenceStatus.PAUSED})
PREEMPTIONS = {
    PreemptionMode.PAUSE: (frozenset({SequenceStatus.ACTIVE}), SequenceStatus.PAUSED),
    PreemptionMode.SWAP: (_ON_DEVICE, SequenceStatus.SWAPPED),
    PreemptionMode.RECOMPUTE: (_ON_DEVICE, SequenceStatus.TO_RECOMPUTE),
}


@dataclass(slots=True)
class _SequenceCopy:
    """The status and sizes that a sequence will have when the plan's runs begin."""

    status: SequenceStatus
    num_tokens: int
    num_computed: int
    num_blocks: int
    num_swapped: int


class PlanCheck:
    """The check of one plan. Call `run` only once."""

    def __init__(
        self,
        info: EngineInfo,
        sequences: Mapping[str, Sequence],
        pool: BlockPool,
        swap_pool: BlockPool,
        suspended: Collection[str] = (),
    ) -> None:
        """`suspended` are the sequences of the suspended step."""
        self._info = info
        self._sequences = sequences
        self._pool = pool
        self._copies: dict[str, _SequenceCopy | None] = {}  # by sequence id; None: aborted by the plan
        self._releasing: list[Sequence] = []  # sequences that release all their blocks
        self._num_needed = 0  # KV blocks that the plan allocates
        self._num_swap_free = swap_pool.num_free
        self._suspended = suspended

    def run(self, plan: StepPlan) -> None:
        """Check `plan` in the order of its execution. Raises `PlanError` for the first rule that the plan breaks."""
        if plan.is_of_suspended:
            if not self._suspended:
                raise PlanError("no step is suspended")
            if not replace(plan, proceed_s=0.0, drop=False).is_empty:
                raise PlanError("a plan that continues or drops the suspended step must say nothing else")
        is_whole = self._info.whole_prompts and len(plan.run) == 1
        if plan.num_tokens > self._info.max_step_tokens and not is_whole:
            raise PlanError(f"{plan.num_tokens} tokens in a step, at most {self._info.max_step_tokens} allowed")
        for seq_id in plan.abort:
            self._abort(seq_id)
        for preempt in plan.preempt:
            self._preempt(preempt)
        for seq_id in plan.resume:
            self._resume(seq_id)
        for new in plan.start:
            self._start(new)
        self._runs(plan.run)
        num_free = self._pool.num_free + self._pool.num_freed_by(s.block_table for s in self._releasing)
        if self._num_needed > num_free:
            raise PlanError(f"the plan needs {self._num_needed} KV blocks and {num_free} are free")

    def _look_up(self, seq_id: str) -> _SequenceCopy:
        if seq_id not in self._copies and seq_id in self._sequences:
            s = self._sequences[seq_id]
            self._copies[seq_id] = _SequenceCopy(
                s.status, s.num_tokens, s.num_computed_tokens, len(s.block_table), len(s.swap_table)
            )
        sequence = self._copies.get(seq_id)
        if sequence is None:
            raise PlanError(f"there is no sequence {seq_id}")
        if seq_id in self._suspended:
            raise PlanError(f"{seq_id} is in the suspended step")
        return sequence

    def _abort(self, seq_id: str) -> None:
        self._num_swap_free += self._look_up(seq_id).num_swapped
        self._copies[seq_id] = None
        self._releasing.append(self._sequences[seq_id])

    def _preempt(self, preempt: Preempt) -> None:
        sequence = self._look_up(preempt.seq_id)
        if preempt.mode.value not in self._info.preemption_modes:
            raise PlanError(f"this engine cannot preempt by {preempt.mode.value}")
        sources, target = PREEMPTIONS[preempt.mode]
        if sequence.status not in sources:
            raise PlanError(f"{preempt.seq_id} is {sequence.status.value}: no preemption by {preempt.mode.value}")
        sequence.status = target
        if target is SequenceStatus.PAUSED:
            return
        self._releasing.append(self._sequences[preempt.seq_id])
        if target is SequenceStatus.SWAPPED:
            self._swap_out(preempt.seq_id, sequence)
        else:
            sequence.num_computed = 0
        sequence.num_blocks = 0

    def _swap_out(self, seq_id: str, sequence: _SequenceCopy) -> None:
        if sequence.num_blocks > self._num_swap_free:
            raise PlanError(f"{seq_id}: {sequence.num_blocks} KV blocks to swap, host memory has {self._num_swap_free}")
        self._num_swap_free -= sequence.num_blocks
        sequence.num_swapped = sequence.num_blocks

    def _resume(self, seq_id: str) -> None:
        sequence = self._look_up(seq_id)
        if sequence.status is SequenceStatus.ACTIVE:
            raise PlanError(f"{seq_id} is not preempted and cannot be resumed")
        sequence.status = SequenceStatus.ACTIVE
        self._num_needed += sequence.num_swapped
        sequence.num_blocks += sequence.num_swapped
        sequence.num_swapped = 0

    def _start(self, new: NewSequence) -> None:
        if self._copies.get(new.seq_id) or (new.seq_id not in self._copies and new.seq_id in self._sequences):
            raise PlanError(f"{new.seq_id} exists already")
        num_prompt = len(new.prompt_token_ids)
        if not 1 <= num_prompt < self._info.max_model_len:
            raise PlanError(f"{new.seq_id}: a prompt of {num_prompt} tokens, not 1 … {self._info.max_model_len - 1}")
        if new.sampling.max_tokens < 1:
            raise PlanError(f"{new.seq_id}: max_tokens is {new.sampling.max_tokens}, not at least 1")
        num_output = len(new.output_token_ids)
        if num_output >= new.sampling.max_tokens or num_prompt + num_output >= self._info.max_model_len:
            raise PlanError(f"{new.seq_id}: an output of {num_output} tokens leaves no room for another one")
        given = (*new.prompt_token_ids, *new.output_token_ids)
        if min(given) < 0 or max(given) >= self._info.vocab_size:
            raise PlanError(f"{new.seq_id}: a token id outside the vocabulary of {self._info.vocab_size}")
        if new.sampling.grammar is not None and new.compiled_grammar is None:
            raise PlanError(f"{new.seq_id}: its grammar is not compiled")
        self._copies[new.seq_id] = _SequenceCopy(SequenceStatus.ACTIVE, len(given), 0, 0, 0)

    def _runs(self, runs: tuple[Run, ...]) -> None:
        seen: set[str] = set()
        for run in runs:
            if run.seq_id in seen:
                raise PlanError(f"{run.seq_id} is run twice")
            seen.add(run.seq_id)
            if run.seq_id in self._suspended:
                raise PlanError(f"{run.seq_id} is in the suspended step")
            known = None if run.seq_id in self._copies else self._sequences.get(run.seq_id)
            if known is None:
                s = self._look_up(run.seq_id)
                self._run(run, s.status, s.num_tokens, s.num_computed, s.num_blocks)
            else:  # the plan changes nothing else about this sequence, so no copy is needed
                self._run(run, known.status, known.num_tokens, known.num_computed_tokens, len(known.block_table))

    def _run(self, run: Run, status: SequenceStatus, num_tokens: int, num_computed: int, num_blocks: int) -> None:
        if status is not SequenceStatus.ACTIVE:
            raise PlanError(f"{run.seq_id} is {status.value} and cannot be run")
        if not 1 <= run.num_tokens <= num_tokens - num_computed:
            raise PlanError(f"{run.seq_id}: {run.num_tokens} tokens of {num_tokens - num_computed} uncomputed")
        if run.draft:
            self._draft(run, num_tokens, num_computed)
        missing = blocks_for(num_computed + run.num_tokens + len(run.draft), self._info.block_size) - num_blocks
        if missing > 0:
            self._num_needed += missing

    def _draft(self, run: Run, num_tokens: int, num_computed: int) -> None:
        if not self._info.verifies_drafts:
            raise PlanError(f"{run.seq_id}: a draft, which this engine does not verify")
        if not num_computed or num_tokens - num_computed != 1:
            raise PlanError(f"{run.seq_id}: a draft may follow a decode only")
        sequence = self._sequences[run.seq_id]
        if sequence.alters_logits:
            raise PlanError(f"{run.seq_id}: a draft, though its logits are altered")
        if len(run.draft) >= sequence.num_tokens_left:
            raise PlanError(f"{run.seq_id}: a draft of {len(run.draft)} tokens, {sequence.num_tokens_left} are left")
        if min(run.draft) < 0 or max(run.draft) >= self._info.vocab_size:
            raise PlanError(f"{run.seq_id}: a draft outside the vocabulary of {self._info.vocab_size}")
