"""The steps in flight: their work, how their time is divided among the tiers, and which sequences to evict from them.

Knows the plan of the step and the predicted cost of its runs. Asks `step_eviction` whether an eviction pays. Sends
nothing to the engine. With async scheduling, a second step may wait in the engine for the running one to end.
`StepCore` owns this object.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.interface import PreemptionMode, SequenceOutput, StepEviction, StepPlan, StepResult
from engine.step_time.cost import StepCost, StepWork
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import TokenBucket
from scheduler.control.delay_account import DelayAccounts, InteractiveRun
from scheduler.control.slowdown import SlowdownMeter
from scheduler.control.step_limit import MAX_WASTED_SHARE
from scheduler.holdings.report import Report
from scheduler.planning.step_eviction import BUCKET_S, StepTiming, weigh_eviction
from scheduler.request_state import RequestState, Status


@dataclass(frozen=True, slots=True)
class _Evictable:
    """A bulk sequence that may be evicted."""

    seq_id: str
    tier: str
    run_s: float  # predicted cost of its run
    priority: float


@dataclass(slots=True)
class _TrackedStep:
    """A submitted step whose result has not come yet. Owned by `RunningStep`."""

    plan: StepPlan
    num_computed: Mapping[str, int]  # number of computed tokens before the step, by sequence
    swaps: bool  # whether the step copies KV blocks to the host or back
    timing: StepTiming
    evictable: list[_Evictable]
    runs_s: Mapping[str, float]  # predicted cost of the runs, by tier
    sequences: Mapping[str, int]  # number of sequences, by tier
    interactive: frozenset[str]  # the interactive tiers with sequences in the step
    interactive_states: Mapping[str, RequestState]  # the requests of these tiers in the step, by sequence
    itl_s: float = NEVER_S  # the shortest ITL SLO of these tiers
    accounts: Sequence[tuple[RequestState, float]] = ()  # requests that want a receipt, and the predicted costs
    is_eviction_requested: bool = False
    wasted_s: float = 0.0  # bulk work that the requested eviction throws away

    def work(self, result: StepResult) -> StepWork | None:
        """Return the work that the step did. Tokens found in the prefix cache do not count.

        Return None if the step's time does not depend on its work alone: blocks were copied, a sequence was evicted or
        failed, or no sequence ran.
        """
        if self.swaps or result.failures or result.evicted or not result.outputs:
            return None
        work = StepWork()
        for output in result.outputs:
            work.add(*self._tokens(output))
        return work

    def interactive_runs(self, result: StepResult) -> list[InteractiveRun]:
        """Return what the step computed of interactive requests."""
        found = ((self.interactive_states.get(output.seq_id), output) for output in result.outputs)
        return [(state, *self._tokens(output)) for state, output in found if state is not None]

    def _tokens(self, output: SequenceOutput) -> tuple[int, int]:
        """Return how many tokens were computed for an output, and how many there were before."""
        start = self.num_computed[output.seq_id] + output.num_cached_tokens
        return output.num_computed_tokens - start, start

    def used_s(self, elapsed_s: float, was_evicted: bool) -> dict[str, float]:
        """Return the engine time that each tier used: `elapsed_s`, shared in proportion to predicted costs.

        The predicted cost of a tier is the cost of its runs plus its part of the step's fixed cost. The fixed cost is
        divided among the tiers whose sequences cannot be evicted, or among the bulk tiers if there are no such tiers.
        After an eviction, the evicted tiers are charged nothing, since their work was thrown away.
        """
        bulk = {evictable.tier for evictable in self.evictable}
        stayed = {tier: s for tier, s in self.runs_s.items() if not (was_evicted and tier in bulk)}
        payers = (stayed.keys() - bulk) or set(stayed)
        fixed_s, payers_s = self.timing.step_s - sum(self.runs_s.values()), sum(stayed[tier] for tier in payers)
        for tier in payers:
            stayed[tier] += fixed_s * (stayed[tier] / payers_s if payers_s else 1 / len(payers))
        scale = elapsed_s / sum(stayed.values()) if stayed else 0.0
        return {tier: s * (min(1.0, scale) if was_evicted else scale) for tier, s in stayed.items()}

    def interactive_s(self, elapsed_s: float, was_evicted: bool) -> float:
        """Return the engine time that the interactive tiers would have taken from urgent bulk.

        This is the cost of their runs, and the fixed cost of as much of a step as this one is long, if bulk makes steps
        as long as the ITL SLO allows. `used_s` charges them the whole fixed cost, so that a few chats without bulk use
        most of the engine by its count.
        """
        if not self.interactive:
            return 0.0
        scale = 1.0 if was_evicted else elapsed_s / self.timing.step_s
        runs_s = sum(self.runs_s[tier] for tier in self.interactive)
        fixed_s = self.timing.step_s - sum(self.runs_s.values())
        return min(elapsed_s, scale * (runs_s + fixed_s * min(1.0, elapsed_s / self.itl_s)))

    @property
    def bulk_share(self) -> float:
        """The share of the step by which bulk makes it longer, as predicted."""
        bulk_s = sum(s for tier, s in self.runs_s.items() if tier not in self.interactive)
        return bulk_s / self.timing.step_s if self.interactive else 1.0

    @property
    def has_bulk(self) -> bool:
        return bool(self.runs_s.keys() - self.interactive)

    def enter(
        self, accounts: DelayAccounts, runs: Sequence[InteractiveRun], result: StepResult, overhead_s: float
    ) -> None:
        """Enter the finished step into the delay accounts. `runs` are its interactive runs."""
        if self.interactive and not self.has_bulk:
            accounts.add_step(runs, result.elapsed_s, overhead_s, is_typical=self.work(result) is not None)
        else:
            accounts.add_shared_step(runs, result.elapsed_s, overhead_s)

    def charge(self, used_s: Mapping[str, float]) -> None:
        """Divide the engine time that each tier used among its sequences, in proportion to predicted costs."""
        for state, run_s in self.accounts:
            runs_s = self.runs_s[state.tier.name]
            if runs_s > 0:
                state.engine_s += used_s.get(state.tier.name, 0.0) * run_s / runs_s


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
        self._steps: dict[int, _TrackedStep] = {}  # by step id; the first entry is the running step

    @property
    def step_s(self) -> float:
        """The predicted length in seconds of the step that runs; 0 if no step runs."""
        step = self._oldest
        return step.timing.step_s if step is not None else 0.0

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

    def ending(self, states: Mapping[str, RequestState], max_model_len: int) -> Counter[str]:
        """Return the number of sequences that are certain to end with the step in flight, by tier."""
        ran = ((run, states.get(run.seq_id)) for run in self.plan.run) if self.plan is not None else ()
        return Counter(s.tier.name for run, s in ran if s is not None and s.ends_with(run.num_tokens, max_model_len))

    @property
    def _oldest(self) -> _TrackedStep | None:
        return next(iter(self._steps.values()), None)

    def begin(
        self, plan: StepPlan, states: Mapping[str, RequestState], cost: StepCost, now: float, protected: Collection[str]
    ) -> None:
        """Track a submitted step. `states` are the request states before the step.

        For an async plan, they do not include the result of the running step: one more token of each sequence.
        Sequences of `protected` tiers are not evicted, because the step serves the min share of these tiers.
        """
        evictable: list[_Evictable] = []
        interactive: dict[str, Tier] = {}
        interactive_states: dict[str, RequestState] = {}
        runs_s: defaultdict[str, float] = defaultdict(float)
        kept_runs_s, num_kept = 0.0, 0
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
                interactive_states[run.seq_id] = state
            if tier.is_interactive or tier.name in protected:
                kept_runs_s += run_s
                num_kept += 1
            else:
                evictable.append(_Evictable(run.seq_id, tier.name, run_s, state.priority))
        step_s = cost.step(kept_runs_s + sum(e.run_s for e in evictable)) if plan.run else 0.0
        timing = StepTiming(now, step_s, cost.step(kept_runs_s) if num_kept else 0.0)
        sequences = Counter(states[run.seq_id].tier.name for run in plan.run)
        itl_s = min((tier.slo.itl_p99_ms or NEVER_S for tier in interactive.values()), default=NEVER_S) / 1000
        swaps = any(p.mode is PreemptionMode.SWAP for p in plan.preempt)
        swaps = swaps or any(states[seq_id].status is Status.SWAPPED for seq_id in plan.resume)
        num_computed = {run.seq_id: states[run.seq_id].num_computed_tokens + plan.ahead for run in plan.run}
        self._steps[plan.step_id] = _TrackedStep(
            plan,
            num_computed,
            swaps,
            timing,
            evictable,
            runs_s,
            sequences,
            frozenset(interactive),
            interactive_states,
            itl_s,
            accounts,
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
        if step is None or step.is_eviction_requested or not step.evictable or step_eviction is StepEviction.NOTHING:
            return ()
        if any(evictable.priority >= newcomer.tier.priority for evictable in step.evictable):
            return ()
        if step.timing.kept_s and step_eviction is not StepEviction.ROWS:
            return ()
        tradeoff = weigh_eviction(step.timing, now, self._num_layers)
        if not tradeoff.pays or self.waste_budget.level < tradeoff.wasted_s:
            return ()
        step.is_eviction_requested, step.wasted_s = True, tradeoff.wasted_s
        return [evictable.seq_id for evictable in step.evictable]

    def open_account(self, state: RequestState) -> None:
        """Open the delay account of a request that was just claimed."""
        step = self._oldest
        if step is None or not step.timing.step_s:
            self.accounts.open(state, 0.0, 0.0)
        else:
            running_s = step.timing.progress(state.arrived_s) * step.timing.step_s
            self.accounts.open(state, running_s, step.bulk_share)

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
        report.sequences, report.work = step.sequences, step.work(result)
        if not step.timing.step_s:
            return
        runs = step.interactive_runs(result)
        step.enter(self.accounts, runs, result, overhead_s)
        self.slowdown.add_step(runs, present, result.elapsed_s + overhead_s, now, has_bulk=step.has_bulk)
        used_s = report.used_s = step.used_s(result.elapsed_s, bool(result.evicted))
        step.charge(used_s)
        if result.evicted:
            wasted_s = min(step.wasted_s, result.elapsed_s)
            self.waste_budget.spend(wasted_s)
            self.wasted_s += wasted_s
            self.num_evictions += 1
        else:
            self.waste_budget.refill(sum(used_s[tier] for tier in {e.tier for e in step.evictable}))
            report.planned_s = step.timing.step_s
        self.bulk_total_s += result.elapsed_s - sum(used_s.get(tier, 0.0) for tier in step.interactive)
        self.interactive_s += step.interactive_s(result.elapsed_s, bool(result.evicted))
