"""The scheduler's record of its engine: free blocks, the steps in flight, and the sequences to abort.

Knows plans and results, and reads request states; decides nothing. `SchedulerCore` owns it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.interface import EngineInfo, PreemptionMode, StepPlan, StepResult, blocks_for
from engine.step_time.cost import StepWork
from scheduler.planning.kv_budget import EngineView
from scheduler.request_state import RequestState, Status


@dataclass(slots=True)
class _Abandoned:
    """The KV blocks that an abandoned sequence is known to hold, and how many of them other sequences share."""

    num_blocks: int
    num_shared: int

    @property
    def own_blocks(self) -> int:
        return max(0, self.num_blocks - self.num_shared)


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A submitted step whose result has not come yet."""

    plan: StepPlan
    num_computed: dict[str, int]  # number of computed tokens before the step, by sequence
    swaps: bool  # whether the step copies KV blocks to the host or back


class EngineState:
    """The free blocks of the engine, its steps in flight, and the sequences that it must abort."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._free_blocks = info.num_blocks
        self._free_swap_blocks = info.num_swap_blocks
        self._abandoned: dict[str, _Abandoned] = {}
        self._in_flight: dict[int, _InFlightStep] = {}  # by step id

    @property
    def kv_usage(self) -> float:
        return 1.0 - self._free_blocks / self._info.num_blocks

    @property
    def is_step_in_flight(self) -> bool:
        return bool(self._in_flight)

    def view(self) -> EngineView:
        """Return the capacity that the next plan can use.

        The blocks of sequences that the plan aborts count as free, because the engine executes aborts first.
        """
        info = self._info
        return EngineView(
            free_blocks=self._free_blocks + sum(a.own_blocks for a in self._abandoned.values()),
            block_size=info.block_size,
            max_step_tokens=info.max_step_tokens,
            max_model_len=info.max_model_len,
            free_swap_blocks=self._free_swap_blocks,
            swap_block_s=info.swap_block_s,
        )

    # -- sequences that the engine holds and no request needs any more -----------------------------------------

    def abandon(self, state: RequestState) -> None:
        """Add a sequence to the sequences that the next plan aborts."""
        self._abandoned[state.id] = _Abandoned(state.blocks_held(self._info.block_size), state.num_shared_blocks)

    @property
    def num_abandoned(self) -> int:
        return len(self._abandoned)

    def is_abandoned(self, request_id: str) -> bool:
        return request_id in self._abandoned

    def forget_abandoned(self, request_id: str) -> None:
        """Remove a sequence from the sequences to abort, because it has ended by itself."""
        del self._abandoned[request_id]

    @property
    def aborts(self) -> Iterable[str]:
        """The ids of the sequences that the next plan must abort."""
        return self._abandoned.keys()

    def pop_aborts(self) -> tuple[str, ...]:
        """Return the ids of the sequences to abort, and clear the list. The caller puts them into a plan."""
        aborts = tuple(sorted(self._abandoned))
        self._abandoned.clear()
        return aborts

    # -- a step ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> StepPlan | None:
        """The plan of the step in flight, if there is exactly one; otherwise None."""
        plans = [step.plan for step in self._in_flight.values()]
        return plans[0] if len(plans) == 1 else None

    def ending(self, states: Mapping[str, RequestState]) -> Counter[str]:
        """Return the number of sequences that are certain to end with the step in flight, by tier."""
        plan = self.running
        ran = ((run, states.get(run.seq_id)) for run in plan.run) if plan is not None else ()
        return Counter(
            s.tier.name for run, s in ran if s is not None and s.ends_with(run.num_tokens, self._info.max_model_len)
        )

    def enter(self, plan: StepPlan, states: Mapping[str, RequestState]) -> None:
        """Record a plan that is submitted.

        `states` are the request states before the plan's step. For an async plan, they do not include the result of the
        running step.
        """
        swaps = any(p.mode is PreemptionMode.SWAP for p in plan.preempt)
        swaps = swaps or any(states[seq_id].status is Status.SWAPPED for seq_id in plan.resume)
        # An async plan starts one token later, since the running step computes one token of each sequence.
        num_computed = {run.seq_id: states[run.seq_id].num_computed_tokens + plan.ahead for run in plan.run}
        self._in_flight[plan.step_id] = _InFlightStep(plan, num_computed, swaps)

    def settle(self, result: StepResult) -> StepWork | None:
        """Record the result of a step, and return the work that the step did.

        Tokens found in the prefix cache do not count as work. Return None if the step's time does not depend on its
        work alone: blocks were copied, a sequence was evicted or failed, or no sequence ran.
        """
        self._free_blocks, self._free_swap_blocks = result.free_blocks, result.free_swap_blocks
        self._update_abandoned(result)
        step = self._in_flight.pop(result.step_id, None)
        if step is None or step.swaps or result.failures or result.evicted or not result.outputs:
            return None
        work = StepWork()
        for output in result.outputs:
            start = step.num_computed[output.seq_id] + output.num_cached_tokens
            work.add(output.num_computed_tokens - start, start)
        return work

    def _update_abandoned(self, result: StepResult) -> None:
        for output in result.outputs:
            if output.seq_id in self._abandoned:
                held = blocks_for(output.num_computed_tokens, self._info.block_size)
                self._abandoned[output.seq_id].num_blocks = held
        for seq_id, num_shared in result.shared_blocks:
            if seq_id in self._abandoned:
                self._abandoned[seq_id].num_shared = num_shared
