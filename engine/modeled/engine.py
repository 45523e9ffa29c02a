"""An engine that computes nothing: a step takes a modeled time, and each token is a hash of (seed, position).

The `SequenceTable` of the native engine keeps the sequences, blocks, finish reasons and the prefix cache, so both
engines refuse the same bad plans. With this engine, the scheduler's loop can be run, tested and simulated without
torch, on a real or a virtual clock. The coefficients, noise and drift of the modeled time are hidden from the
controller, which has to learn them.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from engine.interface import EngineInfo, PlanError, SequenceOutput, StepEnd, StepPlan, StepResult
from engine.sequences.chunk import Chunk, Outcome, output_of
from engine.sequences.sequence_table import SequenceTable
from engine.step_time.cost import StepCost

_UNKNOWN_TOKEN = -1  # stands for the token that a step in flight samples
FIRST_ORDINARY_TOKEN = 3  # lower ids are never generated: they stand for a model's special tokens


def modeled_token(seed: int, index: int, vocab_size: int) -> int:
    """Return output token number `index` of a sequence with `seed`.

    The token is the same on every engine and after every preemption.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return FIRST_ORDINARY_TOKEN + mixed % (vocab_size - FIRST_ORDINARY_TOKEN)


class Timer(Protocol):
    """A clock with a wait whose end can be moved during the wait. `LoopTimer` implements this protocol."""

    def now(self) -> float: ...

    async def wait_until(self, when_s: float) -> None: ...

    def move(self, when_s: float) -> None: ...


@dataclass(slots=True)
class _Step:
    """A step in flight or suspended: of `duration_s` seconds, `done_s` are done when it begins or is continued."""

    step_id: int
    chunks: list[Chunk]
    duration_s: float
    until_s: float  # it ends or is suspended when so much of it is done
    started_s: float  # when it began or was continued
    done_s: float = 0.0
    is_dropped: bool = False
    late_s: float = 0.0

    @property
    def ends_s(self) -> float:
        return self.started_s + self.until_s - self.done_s

    def stop_after(self, seconds: float, num_layers: int) -> None:
        """Suspend the step at the first layer boundary `seconds` after it began or was continued."""
        layer_s = self.duration_s / num_layers
        if self.done_s + seconds < self.duration_s:
            layers = max(ceil((self.done_s + seconds) / layer_s), round(self.done_s / layer_s) + 1)
            self.until_s = min(self.until_s, layers * layer_s) if layers < num_layers else self.until_s


class ModeledEngine:
    """An `Engine` that computes nothing: its steps only wait.

    Without a `timer`, `sleep` waits until a step ends: in virtual time in the simulator, in real time in a test of the
    real loop. With a `timer`, the timer waits instead. If `info.suspends_steps`, a running step can then be suspended
    at the next boundary between two layers. `drift` is a function from the timer's time to a factor on the time of a
    step.

    `cost` is the cost of steps that hold a prefill chunk. `decode_cost` is the cost of all other steps; None: the same
    as `cost`. `noise` is the standard deviation of a step's time, as a share of that time. The prefix cache is off by
    default: traces contain lengths, not texts, and texts made up for these lengths would share cached blocks by
    mistake. Engines with different `salt`s answer the same request differently. After `period` tokens, an output begins
    again.
    """

    def __init__(
        self,
        info: EngineInfo,
        sleep: Callable[[float], Awaitable[None]],
        cost: StepCost | None = None,
        noise: float = 0.05,
        seed: int = 0,
        *,
        decode_cost: StepCost | None = None,
        prefix_cache: bool = False,
        timer: Timer | None = None,
        drift: Callable[[float], float] | None = None,
        salt: int = 0,
        period: int = 1 << 60,
    ) -> None:
        """Make an engine without sequences. Raises `ValueError` if there is a drift but no timer."""
        if drift is not None and timer is None:
            raise ValueError("a drift over time needs a timer")
        suspends = info.suspends_steps and timer is not None and not info.steps_ahead
        drafts = info.verifies_drafts and not info.steps_ahead
        self.info = replace(info, suspends_steps=suspends, caches_prefixes=prefix_cache, verifies_drafts=drafts)
        self._sleep = sleep
        self._cost = cost or StepCost()
        self._decode_cost = decode_cost or self._cost
        self._noise = noise
        self._random = random.Random(seed)
        self._prefix_cache = prefix_cache
        self._timer = timer
        self._drift = drift
        self._salt = salt
        self._period = period
        self._table = SequenceTable(self.info, prefix_cache=prefix_cache)
        self._running: _Step | None = None
        self._next: _Step | None = None  # begins when the running step ends; only with `info.steps_ahead`
        self._ended_s = 0.0  # when the newest step ended
        self._suspended: _Step | None = None

    @property
    def num_used_blocks(self) -> int:
        return self._table.pool.num_used

    @property
    def num_used_swap_blocks(self) -> int:
        return self._table.swap_pool.num_used

    async def compile_grammar(self, grammar: str) -> object:
        """Return the grammar as it is: modeled tokens follow no grammar."""
        return grammar

    def submit(self, plan: StepPlan) -> None:
        """Begin a step. Raises `PlanError` if the plan breaks the rules or too many steps are in flight."""
        if self._running is not None and not (plan.ahead and self.info.steps_ahead and self._next is None):
            raise PlanError("a step is in flight already: collect it first")
        if plan.ahead:
            plan = self._table.without_ended(plan)
        self._table.check(plan)
        step = self._go_on(plan) if plan.is_of_suspended else self._begin(plan)
        if self._running is None:
            self._running = step
        else:
            self._next = step

    async def collect(self) -> StepResult:
        """Wait for the step in flight and return its result. Raises `RuntimeError` if no step is in flight.

        With a timer, a call may be cancelled: the next call waits for the rest of the same step.
        """
        step = self._running
        if step is None:
            raise RuntimeError("no step is in flight: submit one first")
        if self._timer is None:
            await self._sleep(step.duration_s)
        else:
            await self._timer.wait_until(step.ends_s)
        self._running, self._next = self._next, None
        self._ended_s = step.ends_s
        elapsed_s, step.done_s = step.until_s - step.done_s, step.until_s
        if step.is_dropped:
            return self._result(step, 0.0, self._table.drop_suspended(), StepEnd.DROPPED)
        if step.until_s < step.duration_s:
            self._suspended, self._table.suspended = step, step.chunks
            return self._result(step, elapsed_s, (), StepEnd.SUSPENDED)
        return self._result(step, elapsed_s, self._outputs(step), StepEnd.DONE)

    def check_alive(self) -> None:
        """Do nothing: nothing computes that could end."""

    def suspend(self) -> None:
        """Suspend the running step at its next layer boundary; after the last boundary, do nothing."""
        step = self._running
        if step is None or self._timer is None or not self.info.suspends_steps or self._suspended is not None:
            return
        step.stop_after(self._timer.now() - step.started_s, self.info.num_layers)
        self._timer.move(step.ends_s)

    def close(self) -> None:
        self._table = SequenceTable(self.info, prefix_cache=self._prefix_cache)
        self._running = self._next = self._suspended = None

    def _begin(self, plan: StepPlan) -> _Step:
        now = 0.0 if self._timer is None else self._timer.now()
        ended_s = self._ended_s if self._running is None else self._running.ends_s
        started_s = now if self._running is None else max(now, ended_s)
        late_s = max(0.0, now - ended_s) if plan.ahead else 0.0
        chunks = self._table.begin(plan)
        copying_s = len(self._table.copies) * self.info.swap_block_s
        slowdown = max(0.1, self._random.gauss(1.0, self._noise)) if chunks else 1.0
        if self._drift is not None:
            slowdown *= self._drift(started_s)
        duration_s = (copying_s + self._computing_s(chunks)) * slowdown
        if self.info.steps_ahead:  # as long as the step is in flight, it has its tokens already
            for chunk in chunks:
                self._table.launch(chunk, _UNKNOWN_TOKEN if chunk.samples else None)
        return _Step(plan.step_id, chunks, duration_s, duration_s, started_s, late_s=late_s)

    def _computing_s(self, chunks: list[Chunk]) -> float:
        if not chunks:
            return 0.0
        cost = self._cost if any(chunk.num_tokens > 1 for chunk in chunks) else self._decode_cost
        runs = [cost.run(chunk.num_tokens, chunk.start, len(chunk.draft)) for chunk in chunks]
        return cost.step(sum(runs))

    def _go_on(self, plan: StepPlan) -> _Step:
        """Return the suspended step as it goes on by `plan`."""
        step, self._suspended = self._suspended, None
        assert step is not None and self._timer is not None, "the plan was checked"
        step.started_s, step.is_dropped = self._timer.now(), plan.drop
        if plan.drop:
            step.until_s = step.done_s
        else:
            self._table.suspended = []
            step.until_s = step.duration_s
            step.stop_after(plan.proceed_s, self.info.num_layers)
        return step

    def _outputs(self, step: _Step) -> tuple[SequenceOutput, ...]:
        if not self.info.steps_ahead:
            return tuple([self._advance(chunk) for chunk in step.chunks])
        outcomes = {chunk.sequence.seq_id: self._sampled(chunk) for chunk in step.chunks}
        return tuple(self._table.finalize_all(step.chunks, outcomes)[0])

    def _result(self, step: _Step, elapsed_s: float, outputs: tuple[SequenceOutput, ...], end: StepEnd) -> StepResult:
        return StepResult(
            step.step_id,
            outputs,
            free_blocks=self._table.pool.num_free,
            elapsed_s=elapsed_s,
            late_s=step.late_s,
            free_swap_blocks=self._table.swap_pool.num_free,
            shared_blocks=self._table.pool.take_changes(),
            end=end,
        )

    def _advance(self, chunk: Chunk) -> SequenceOutput:
        outcome = self._sampled(chunk)
        return output_of(chunk, outcome, self._table.advance(chunk, outcome.token_ids))

    def _sampled(self, chunk: Chunk) -> Outcome:
        """Return what the chunk samples, if anything."""
        sequence = chunk.sequence
        if chunk.end < sequence.num_tokens and sequence.token_ids[chunk.end] != _UNKNOWN_TOKEN:
            return Outcome()
        seed, first = sequence.sampling.seed + self._salt, chunk.end - sequence.num_prompt_tokens
        indices = (index % self._period for index in range(first, first + 1 + len(chunk.draft)))
        return chunk.verified(Outcome((modeled_token(seed, index, self.info.vocab_size),)) for index in indices)
