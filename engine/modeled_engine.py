"""An engine that computes nothing: steps take modeled time, tokens are a hash of (seed, position).

It keeps the same books as the real one (sequences, blocks, finish reasons) and refuses the same bad plans, so that the
scheduler's loop can be run, tested and simulated without torch, on whatever clock it is given. Its coefficients and
noise are its own; the controller must learn them, it is never told.
"""

import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from engine.interface import (
    EngineInfo,
    FinishReason,
    NewSequence,
    PlanError,
    Preempt,
    PreemptionMode,
    Run,
    SequenceOutput,
    StepPlan,
    StepResult,
    blocks_for,
)
from engine.latency_model import StepCost

FIRST_ORDINARY_TOKEN = 3  # ids below are never generated; a real model's special ids


@dataclass(slots=True)
class _ModeledSequence:
    new: NewSequence
    num_computed: int = 0
    output: list[int] = field(default_factory=list)
    paused: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.new.prompt_token_ids) + len(self.output)


def modeled_token(seed: int, index: int, vocab_size: int) -> int:
    """The `index`-th output token of a sequence with `seed`: the same on any engine, after any preemption."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return FIRST_ORDINARY_TOKEN + mixed % (vocab_size - FIRST_ORDINARY_TOKEN)


class ModeledEngine:
    """Implements `Engine`. `sleep` is the clock's: virtual in the simulator, real in a test of the real loop."""

    def __init__(
        self,
        info: EngineInfo,
        sleep: Callable[[float], Awaitable[None]],
        cost: StepCost | None = None,
        noise: float = 0.05,
        seed: int = 0,
    ) -> None:
        self._info = info
        self._sleep = sleep
        self._cost = cost or StepCost()
        self._noise = noise
        self._random = random.Random(seed)
        self._sequences: dict[str, _ModeledSequence] = {}
        self._submitted: deque[StepPlan] = deque()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def used_blocks(self) -> int:
        return sum(blocks_for(s.num_computed, self._info.block_size) for s in self._sequences.values())

    def submit(self, plan: StepPlan) -> None:
        if self._submitted:
            raise PlanError("one step in flight, not more")
        self._submitted.append(plan)

    async def collect(self) -> StepResult:
        plan = self._submitted[0]
        elapsed_s = self._duration(plan)
        await self._sleep(elapsed_s)
        self._submitted.popleft()
        for seq_id in plan.abort:
            del self._sequences[seq_id]
        for preempt in plan.preempt:
            self._preempt(preempt)
        for seq_id in plan.resume:
            self._known(seq_id).paused = False
        for new in plan.start:
            if new.seq_id in self._sequences:
                raise PlanError(f"{new.seq_id} runs already")
            self._sequences[new.seq_id] = _ModeledSequence(new)
        outputs = tuple(self._advance(run) for run in plan.run)
        free = self._info.num_blocks - self.used_blocks
        if free < 0:
            raise PlanError(f"the plan needs {-free} KV blocks more than there are")
        return StepResult(plan.step_id, outputs, (), free, elapsed_s)

    def close(self) -> None:
        self._sequences.clear()

    def _known(self, seq_id: str) -> _ModeledSequence:
        if seq_id not in self._sequences:
            raise PlanError(f"unknown sequence {seq_id}")
        return self._sequences[seq_id]

    def _preempt(self, preempt: Preempt) -> None:
        sequence = self._known(preempt.seq_id)
        if preempt.mode is PreemptionMode.SWAP:
            raise PlanError("this engine does not swap")
        sequence.paused = True
        if preempt.mode is PreemptionMode.RECOMPUTE:
            sequence.num_computed = 0

    def _advance(self, run: Run) -> SequenceOutput:
        sequence = self._known(run.seq_id)
        if sequence.paused:
            raise PlanError(f"{run.seq_id} is paused")
        if not 1 <= run.num_tokens <= sequence.num_tokens - sequence.num_computed:
            raise PlanError(f"{run.seq_id} cannot run {run.num_tokens} tokens")
        sequence.num_computed += run.num_tokens
        if sequence.num_computed < sequence.num_tokens:
            return SequenceOutput(run.seq_id, sequence.num_computed)
        sampling = sequence.new.sampling
        token = modeled_token(sampling.seed, len(sequence.output), self._info.vocab_size)
        sequence.output.append(token)
        reason = self._finish_reason(sequence, token)
        if reason is not None:
            del self._sequences[run.seq_id]
        return SequenceOutput(run.seq_id, sequence.num_computed, (token,), reason)

    def _finish_reason(self, sequence: _ModeledSequence, token: int) -> FinishReason | None:
        if token in sequence.new.sampling.stop_token_ids:
            return FinishReason.STOP
        full = sequence.num_tokens >= self._info.max_model_len
        if full or len(sequence.output) >= sequence.new.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _duration(self, plan: StepPlan) -> float:
        if not plan.run:
            return 0.0
        seconds = self._cost.step_s
        for run in plan.run:
            sequence = self._sequences.get(run.seq_id)
            context = sequence.num_computed if sequence else 0
            seconds += self._cost.run(run.num_tokens, context)
        return seconds * max(0.1, self._random.gauss(1.0, self._noise))
