"""The steps in flight: their work, how their time is divided among the tiers, and which sequences to evict from them.

Knows the plan of the step and the predicted cost of its runs. Asks `step_eviction` whether an eviction pays. Sends
nothing to the engine. With async scheduling, a second step may wait in the engine for the running one to end.
`StepCore` owns this object.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from engine.interface import PreemptionMode, StepEviction, StepPlan, StepResult
from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import TokenBucket
from scheduler.control.delay_account import DelayAccounts
from scheduler.control.slowdown import SlowdownMeter
from scheduler.control.step_limit import MAX_WASTED_SHARE
from scheduler.drivers.steps.tracked_step import TrackedRun, TrackedStep
from scheduler.holdings.report import Report
from scheduler.planning.step_eviction import BUCKET_S, StepTiming, weigh_eviction
from scheduler.request_state import RequestState, Status


class RunningStep:
    """The submitted steps whose results have not come yet. The oldest of them is the running step."""

    def __init__(self, num_layers: int, draw: Callable[[], float]) -> None:
        """`draw` returns a random number in [0, 1)."""
        self._num_layers = num_layers
        self.accounts = DelayAccounts()
        self.slowdown = SlowdownMeter(draw, self.accounts.step_time)
        self.waste_budget = TokenBucket(BUCKET_S, MAX_WASTED_SHARE, BUCKET_S)
        self.wasted_s = 0.0  # seconds of bulk work thrown away in total
        self.num_evictions = 0  # number of steps from which sequences were evicted
        self.bulk_total_s = 0.0  # engine time that tiers without a latency SLO took, including work thrown away
        self.interactive_s = 0.0  # engine time that interactive tiers would have taken from urgent bulk
        self._steps: dict[int, TrackedStep] = {}  # by step id; the first entry is the running step

    @property
    def step_s(self) -> float:
        """The predicted length in seconds of the step that runs; 0 if no step runs."""
        step = self._oldest
        return step.timing.step_s if step is not None else 0.0

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
        step = self._oldest
        if not is_ahead or step is None:
            return self.accounts.left_s(states)
        runs = step.planned_interactive()
        return self.accounts.left_after_s(states, runs, step.expected_s, is_protected=step.is_protected)

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

    def cost_of(self, seq_id: str) -> float:
        """Return the predicted cost in seconds of a sequence's run in the newest step."""
        return next(reversed(self._steps.values())).runs[seq_id].run_s

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

        Sequences of `protected` tiers are not evicted, because the step serves the min share of these tiers.
        """
        runs: dict[str, TrackedRun] = {}
        interactive: dict[str, Tier] = {}
        runs_s: defaultdict[str, float] = defaultdict(float)
        accounts: list[tuple[RequestState, float]] = []
        for run in plan.run:
            state = states[run.seq_id]
            tier = state.tier
            run_s = cost.run(run.num_tokens, state.num_computed_tokens)
            runs_s[tier.name] += run_s
            if state.request.wants_receipt:
                accounts.append((state, run_s))
            if tier.is_interactive:
                interactive[tier.name] = tier
            runs[run.seq_id] = TrackedRun(state, run_s, tier.name in protected)
        timing = StepTiming(now, cost.step(sum(runs_s.values())) if plan.run else 0.0, 0.0)
        sequences = Counter(states[run.seq_id].tier.name for run in plan.run)
        itl_s = min((tier.slo.itl_p99_ms or NEVER_S for tier in interactive.values()), default=NEVER_S) / 1000
        swaps = any(p.mode is PreemptionMode.SWAP for p in plan.preempt)
        swaps = swaps or any(states[seq_id].status is Status.SWAPPED for seq_id in plan.resume)
        num_computed = {run.seq_id: states[run.seq_id].num_computed_tokens for run in plan.run}
        self._steps[plan.step_id] = TrackedStep(
            plan,
            num_computed,
            swaps,
            timing,
            cost,
            runs,
            runs_s,
            sequences,
            frozenset(interactive),
            itl_s,
            accounts,
            expected_s,
        )

    def evictees(self, newcomer: RequestState, step_eviction: StepEviction, now: float) -> Sequence[str]:
        """Return the sequences to evict from the running step for `newcomer`: all evictable sequences, or none.

        The result is empty if an eviction does not pay or is not possible. It is not possible in these cases:
        - The engine cannot evict.
        - The engine can evict only whole steps, and the step has sequences that must stay.
        - An evictable sequence has the newcomer's priority or a higher one.
        - An eviction from this step was requested before.
        """
        step = self._oldest
        if step is None or step.is_eviction_requested or step_eviction is StepEviction.NOTHING:
            return ()
        evictable = step.evictable()
        if not evictable or any(run.state.priority >= newcomer.priority for run in evictable):
            return ()
        timing = step.timing_for(evictable)
        if timing.kept_s and step_eviction is not StepEviction.ROWS:
            return ()
        tradeoff = weigh_eviction(timing, now, self._num_layers)
        if not tradeoff.pays or self.waste_budget.level < tradeoff.wasted_s:
            return ()
        step.is_eviction_requested, step.wasted_s = True, tradeoff.wasted_s
        return [run.state.id for run in evictable]

    def open_account(self, state: RequestState) -> None:
        """Open the delay account of a request that was just claimed."""
        step = self._oldest
        if step is None or not step.timing.step_s:
            self.accounts.open(state, 0.0, 0.0)
        else:
            running_s = step.timing.progress(state.arrived_s) * step.timing.step_s
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

        `present` are the interactive requests. `overhead_s` is the host's time for the step.

        A requested eviction that came too late threw no work away, so it takes nothing from the waste budget.
        """
        step = self._steps.pop(result.step_id, None)
        if step is None:
            return
        if self._oldest is not None:
            self._oldest.note_cached(result)
        report.sequences, report.work = step.sequences, step.work(result)
        if not step.timing.step_s:
            return
        runs = step.interactive_runs(result)
        step.enter(self.accounts, runs, result, overhead_s)
        self.slowdown.add_step(runs, present, result.elapsed_s + overhead_s, now, has_bulk=step.has_bulk)
        used_s = report.used_s = step.used_s(result.elapsed_s, result.evicted)
        step.charge(used_s)
        if result.evicted:
            wasted_s = min(step.wasted_s, result.elapsed_s)
            self.waste_budget.spend(wasted_s)
            self.wasted_s += wasted_s
            self.num_evictions += 1
        else:
            self.waste_budget.refill(step.evictable_s(used_s))
            report.planned_s = step.timing.step_s
        self.bulk_total_s += result.elapsed_s - sum(used_s.get(tier, 0.0) for tier in step.interactive)
        self.interactive_s += step.interactive_s(result.elapsed_s, bool(result.evicted))
