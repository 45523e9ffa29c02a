"""The step in flight as far as leaving it goes: who could, what that would save a newcomer, and what it would waste.

Knows the plan, what its runs were predicted to cost, and whose turn is owed; asks `shedding` whether it pays. Sends
nothing to the engine. Owner: `SchedulerCore`.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from engine.interface import StepEviction, StepPlan, StepResult
from engine.step_time.model import StepCost
from scheduler.planning.step_eviction import StepInFlight, TokenBucket, exchange
from scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class _Evictee:
    seq_id: str
    tier: str
    seconds: float
    priority: float


@dataclass(frozen=True, slots=True)
class StepUsage:
    """What a finished step was used for."""

    sequences: Mapping[str, int] = field(default_factory=dict)  # planned to run, by tier
    used_s: Mapping[str, float] = field(default_factory=dict)  # engine time by tier, without what was thrown away


@dataclass(slots=True)
class _Record:
    """A step on its way. Owner: `RunningStep`."""

    step: StepInFlight
    bulk: list[_Evictee]
    seconds: dict[str, float]  # predicted, by tier
    sequences: Mapping[str, int]  # by tier
    promised: frozenset[str]  # the interactive ones among these
    thrown_s: float = 0.0
    is_asked: bool = False

    def used_s(self, elapsed_s: float, was_left: bool) -> dict[str, float]:
        """How `elapsed_s` falls on the tiers that stayed, by what their runs were predicted to cost. The step's fixed
        cost falls on those that bulk rides with, if there are any. What bulk had done when it left is of no use."""
        bulk = {evictee.tier for evictee in self.bulk}
        stayed = {tier: s for tier, s in self.seconds.items() if not (was_left and tier in bulk)}
        payers = (stayed.keys() - bulk) or set(stayed)
        fixed_s, payers_s = self.step.step_s - sum(self.seconds.values()), sum(stayed[tier] for tier in payers)
        for tier in payers:
            stayed[tier] += fixed_s * (stayed[tier] / payers_s if payers_s else 1 / len(payers))
        scale = elapsed_s / sum(stayed.values()) if stayed else 0.0
        return {tier: s * (min(1.0, scale) if was_left else scale) for tier, s in stayed.items()}


class RunningStep:
    def __init__(self) -> None:
        self.credit = TokenBucket()
        self.bulk_total_s = 0.0  # engine time that tiers without a promise have taken, of use or not
        self._records: dict[int, _Record] = {}  # by step, the one that runs first

    @property
    def step_s(self) -> float:
        """Predicted, of the step that runs; 0: none does."""
        record = self._oldest
        return record.step.step_s if record is not None else 0.0

    @property
    def _oldest(self) -> _Record | None:
        return next(iter(self._records.values()), None)

    def begin(
        self, plan: StepPlan, states: Mapping[str, RequestState], cost: StepCost, now: float, protected: Collection[str]
    ) -> None:
        """`states` as they are before the step. Sequences of `protected` tiers stay in it: their floor is due."""
        bulk: list[_Evictee] = []
        promised: set[str] = set()
        seconds: defaultdict[str, float] = defaultdict(float)
        sequences: Counter[str] = Counter()
        others_s, num_others = 0.0, 0
        for run in plan.run:
            state = states[run.seq_id]
            run_s = cost.run(run.num_tokens, state.num_computed_tokens)
            seconds[state.tier.name] += run_s
            sequences[state.tier.name] += 1
            if state.tier.is_interactive:
                promised.add(state.tier.name)
            if state.tier.is_interactive or state.tier.name in protected:
                others_s += run_s
                num_others += 1
            else:
                bulk.append(_Evictee(run.seq_id, state.tier.name, run_s, state.priority))
        step_s = cost.step(others_s + sum(evictee.seconds for evictee in bulk)) if plan.run else 0.0
        step = StepInFlight(now, step_s, cost.step(others_s) if num_others else 0.0)
        self._records[plan.step_id] = _Record(step, bulk, seconds, sequences, frozenset(promised))

    def evictees(self, newcomer: RequestState, step_eviction: StepEviction, now: float) -> Sequence[str]:
        """Who shall leave for `newcomer`, if that pays and is possible: all bulk below it, or nobody. Once a step."""
        record = self._oldest
        if record is None or record.is_asked or not record.bulk or step_eviction is StepEviction.NOTHING:
            return ()
        if any(evictee.priority >= newcomer.tier.priority for evictee in record.bulk):
            return ()
        if record.step.kept_s and step_eviction is not StepEviction.ROWS:
            return ()
        deal = exchange(record.step, now)
        if not deal.pays or not self.credit.can_spend(deal.thrown_s):
            return ()
        record.is_asked, record.thrown_s = True, deal.thrown_s
        return [evictee.seq_id for evictee in record.bulk]

    def end(self, result: StepResult) -> StepUsage:
        """The step is done: how its time falls on the tiers that it was of use to. A wish to leave that came too late
        cost nothing."""
        record = self._records.pop(result.step_id, None)
        if record is None or not record.step.step_s:
            return StepUsage(record.sequences if record is not None else {})
        used_s = record.used_s(result.elapsed_s, bool(result.evicted))
        if result.evicted:
            self.credit.spend(min(record.thrown_s, result.elapsed_s))
        else:
            self.credit.earn(sum(used_s[tier] for tier in {evictee.tier for evictee in record.bulk}))
        self.bulk_total_s += result.elapsed_s - sum(used_s.get(tier, 0.0) for tier in record.promised)
        return StepUsage(record.sequences, used_s)
