"""The steps in flight and the suspended one: their work, and how their time is divided among the tiers.

Knows the plan of the step and the predicted cost of its runs. Sends nothing to the engine. With async scheduling, a
second step may wait in the engine for the running one to end.
`StepCore` owns this object.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from engine.interface import PreemptionMode, StepEnd, StepPlan, StepResult
from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.delay_account import DelayAccounts
from scheduler.control.slowdown import SlowdownMeter
from scheduler.drivers.steps.tracked_step import TrackedRun, TrackedStep
from scheduler.holdings.report import Report
from scheduler.request_state import RequestState, Status


class RunningStep:
    """The submitted steps whose results have not come yet. The oldest of them is the running step."""

    def __init__(self, num_layers: int, draw: Callable[[], float]) -> None:
        """`draw` returns a random number in [0, 1)."""
        self._num_layers = num_layers
        self.accounts = DelayAccounts()
        self.slowdown = SlowdownMeter(draw, self.accounts.step_time)
        self.wasted_s = 0.0  # engine time of steps that were dropped
        self.num_suspensions = 0  # how often a step was suspended
        self.bulk_total_s = 0.0  # engine time that tiers without a latency SLO took, including work thrown away
        self.interactive_s = 0.0  # engine time that interactive tiers would have taken from urgent bulk
        self._steps: dict[int, TrackedStep] = {}  # by step id; the first entry is the running step
        self.suspended: TrackedStep | None = None

    @property
    def step_s(self) -> float:
        """The predicted length in seconds of the step that runs; 0 if no step runs."""
        step = self._oldest
        return step.step_s if step is not None else 0.0

    @property
    def expected_s(self) -> float:
        """The length in seconds that the step that runs is expected to have; `step_s` is rather too long than short."""
        step = self._oldest
        return step.expected_s if step is not None else 0.0

    @property
    def copies_blocks(self) -> bool:
        """Whether the step that runs copies KV blocks to the host or back."""
        return self._oldest is not None and self._oldest.swaps

    def left_s(self, states: Iterable[RequestState], *, is_ahead: bool) -> float:
        """Return the time that bulk may add to the next step (`DelayAccounts.left_s`).

        With `is_ahead`, the step that runs counts as if it had ended as expected.
        """
        step, next_s = self._oldest, self.accounts.fixed_s
        if not is_ahead or step is None:
            return self.accounts.left_s(states, next_s)
        runs = step.planned_interactive()
        return self.accounts.left_after_s(states, runs, step.expected_s, next_s, is_protected=step.is_protected)

    @property
    def is_any(self) -> bool:
        return bool(self._steps)

    @property
    def has_bulk(self) -> bool:
        """Whether any submitted step has sequences without a latency SLO."""
        return any(step.has_bulk for step in self._steps.values())

    @property
    def plan(self) -> StepPlan | None:
        """The plan of the step in flight, if there is exactly one; otherwise None."""
        return self._oldest.plan if self._oldest is not None and len(self._steps) == 1 else None

    def newest_charges(self) -> Iterator[tuple[RequestState, float]]:
        """Return the engine time that each interactive request takes in the newest step (`TrackedStep.charges`)."""
        return next(reversed(self._steps.values())).charges()

    def ending(self, states: Mapping[str, RequestState], max_model_len: int) -> Counter[str]:
        """Return the number of sequences that are certain to end with the step in flight, by tier."""
        ran = ((run, states.get(run.seq_id)) for run in self.plan.run) if self.plan is not None else ()
        return Counter(s.tier.name for run, s in ran if s is not None and s.ends_with(run.num_tokens, max_model_len))

    @property
    def _oldest(self) -> TrackedStep | None:
        return next(iter(self._steps.values()), None)

    def begin(
        self,
        plan: StepPlan,
        states: Mapping[str, RequestState],
        cost: StepCost,
        now: float,
        protected: Collection[str],
        expected_s: float = 0.0,
    ) -> None:
        """Track a submitted step, which should take `expected_s`. `states` are the request states before the step.

        A step with sequences of `protected` tiers is not suspended, because it serves the min share of these tiers.
        """
        runs: dict[str, TrackedRun] = {}
        interactive: dict[str, Tier] = {}
        runs_s: defaultdict[str, float] = defaultdict(float)
        accounts: list[tuple[RequestState, float]] = []
        sequences: defaultdict[str, int] = defaultdict(int)
        num_computed: dict[str, int] = {}
        for run in plan.run:
            state = states[run.seq_id]
            tier = state.tier
            run_s = cost.run(run.num_tokens, state.num_computed_tokens, len(run.draft))
            runs_s[tier.name] += run_s
            sequences[tier.name] += 1
            num_computed[run.seq_id] = state.num_computed_tokens
            if state.request.wants_receipt:
                accounts.append((state, run_s))
            if tier.is_interactive:
                interactive[tier.name] = tier
            runs[run.seq_id] = TrackedRun(state, run_s, tier.name in protected)
        step_s = cost.step(sum(runs_s.values())) if plan.run else 0.0
        itl_s = min((tier.slo.itl_p99_ms or NEVER_S for tier in interactive.values()), default=NEVER_S) / 1000
        swaps = any(p.mode is PreemptionMode.SWAP for p in plan.preempt)
        swaps = swaps or any(states[seq_id].status is Status.SWAPPED for seq_id in plan.resume)
        self._steps[plan.step_id] = TrackedStep(
            plan,
            num_computed,
            swaps,
            now,
            step_s,
            runs,
            runs_s,
            sequences,
            frozenset(interactive),
            itl_s,
            accounts,
            expected_s,
        )

    def suspends_for(self, newcomer: RequestState, newcomer_s: float, now: float) -> bool:
        """Return whether to suspend the running step for `newcomer`, which takes `newcomer_s` seconds by itself.

        Only one step is suspended at a time.
        """
        step = self._oldest
        return step is not None and self.suspended is None and step.suspends_for(newcomer, newcomer_s, now)

    def go_on(self, now: float) -> int:
        """Track the suspended step as running again, and return its id."""
        step, self.suspended = self.suspended, None
        assert step is not None, "only a suspended step goes on"
        step.started_s = now
        self._steps[step.plan.step_id] = step
        return step.plan.step_id

    def open_account(self, state: RequestState) -> None:
        """Open the delay account of a request that was just claimed."""
        step = self._oldest
        if step is None or not step.step_s:
            self.accounts.open(state, 0.0, 0.0)
        else:
            running_s = step.progress_s(state.arrived_s) - step.done_s
            self.accounts.open(state, running_s, step.others_share)

    def end(
        self,
        result: StepResult,
        report: Report,
        overhead_s: float = 0.0,
        present: Iterable[RequestState] = (),
        now: float = 0.0,
    ) -> None:
        """Stop tracking a step that ends now, and add its work and its use to the report.

        `present` are the interactive requests. `overhead_s` is the host's time for the step. A step that was suspended
        is tracked on; only its time counts now.
        """
        step = self._steps.pop(result.step_id, None)
        if step is None:
            return
        if self._oldest is not None:
            self._oldest.note_cached(result)
        if step.step_s:
            self._charge(step, result.elapsed_s, report)
        if result.end is StepEnd.SUSPENDED:
            self._suspend(step, result.elapsed_s, overhead_s, present, now)
            return
        report.sequences, report.work = step.sequences, step.work(result)
        report.drafts = step.drafts(result)
        report.elapsed_s = step.done_s + result.elapsed_s
        if result.end is StepEnd.DROPPED:
            self.wasted_s += step.done_s
        if result.end is StepEnd.DROPPED or not step.step_s:
            return
        runs = step.interactive_runs(result)
        step.enter(self.accounts, runs, result, overhead_s)
        self.slowdown.add_step(runs, present, result.elapsed_s + overhead_s, now, has_bulk=step.has_bulk)
        report.planned_s = 0.0 if step.done_s else step.step_s
        self.interactive_s += step.interactive_s(report.elapsed_s)

    def _charge(self, step: TrackedStep, elapsed_s: float, report: Report) -> None:
        """Divide the engine time of a step, or of a part of it, among its tiers and requests."""
        used_s = report.used_s = step.used_s(elapsed_s)
        step.charge(used_s)
        self.bulk_total_s += elapsed_s - sum(used_s.get(tier, 0.0) for tier in step.interactive)

    def _suspend(
        self, step: TrackedStep, elapsed_s: float, overhead_s: float, present: Iterable[RequestState], now: float
    ) -> None:
        step.done_s += elapsed_s
        step.num_beside = 0
        self.suspended = step
        self.num_suspensions += 1
        for run in step.runs.values():
            run.state.note_suspended(now)
        delay_s = step.others_share * elapsed_s
        step.delay_s += delay_s
        self.accounts.add_delay(delay_s + overhead_s)
        self.slowdown.add_step((), present, elapsed_s + overhead_s, now, has_bulk=True)
