"""The SLA controller: it decides from observed latencies how much each tier may do in the next step.

The controller has two loops. The inner loop, `budgets`, runs before every step. It looks forward: it limits the step by
the deadlines of interactive sequences (`scheduler.control.step_limit`). The outer loop, `update`, runs twice a second.
It looks back: it moves the knobs (batch size and max-wait) inside the bounds of tiers.yaml
(`scheduler.control.feedback`). Every move is reported as a `Decision`, which names the signal that caused the move.

Knows tiers, latencies and predicted costs. Does not read a clock and does not use queues, the engine or metrics.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from engine.step_time.cost import StepCost
from engine.step_time.ewma import Ewma
from scheduler.clock import NEVER_S
from scheduler.config import Tier, TierSet
from scheduler.control.budget import ALONE_KV_RESERVE, KV_RESERVE, Budgets, TierBudget
from scheduler.control.explanation import TierOutputs, explain_tier
from scheduler.control.feedback import InteractiveLoad, Load, move_bulk, move_interactive
from scheduler.control.knobs import Decision, TierKnobs
from scheduler.control.min_share import MinShares
from scheduler.control.step_limit import (
    FIRST_STEP_SHARE,
    WHOLE_STEP,
    InteractiveTraffic,
    InteractiveWork,
    StepLimits,
    bulk_alone_s,
    is_overloaded,
    step_limits,
)
from scheduler.control.tier_stats import NEWEST_WEIGHT, TierStats
from scheduler.control.windows import SlidingWindow
from scheduler.deadlines import deadline_s
from scheduler.request_state import RequestState

# Share of the time until the next token is due that is kept in reserve. The margin is what would have kept 99 % of the
# newest steps inside their limits: 1 - 1 / p99 of measured ÷ predicted step times. It is never outside these bounds.
MIN_MARGIN, START_MARGIN, MAX_MARGIN = 0.05, 0.15, 0.3
NUM_DECISIONS = 200  # number of newest decisions that `explain` shows


class SLAController:
    """The controller of one worker: it observes latencies, sets the budgets of steps and moves the knobs."""

    def __init__(self, tiers: TierSet, num_layers: int = 30, *, suspends_steps: bool = False) -> None:
        """`suspends_steps`: the engine can suspend a running step after each of its `num_layers` layers."""
        self._engine_suspends = suspends_steps
        self._num_layers = num_layers
        self._tiers: Sequence[Tier] = ()
        self._knobs: dict[str, TierKnobs] = {}
        self._fixed: dict[str, TierBudget] = {}  # `_fixed_budget` of each tier, since the last change of what it reads
        self._stats: dict[str, TierStats] = {}
        self._min_shares = MinShares(())
        self.reconfigure(tiers)
        self._overhead_s = Ewma(NEWEST_WEIGHT)  # host time that a step takes besides engine time
        self._step_errors = SlidingWindow()  # measured ÷ predicted times of the newest steps
        self._margin = START_MARGIN
        self._overloaded: frozenset[str] = frozenset()
        self._is_bulk_alone = False  # no interactive request is there, or has ended within `WINDOW_S`
        self._cost = StepCost()  # of the newest budgets
        self._decisions: deque[tuple[float, Decision]] = deque(maxlen=NUM_DECISIONS)

    def reconfigure(self, tiers: TierSet) -> None:
        """Use new bounds, SLOs, pins and switches. Learned values are kept if they still apply."""
        knobs, stats, min_shares = self._knobs, self._stats, self._min_shares
        slos = {tier.name: tier.slo for tier in self._tiers}
        self._tiers, self._switches = tiers.by_priority, tiers.controller
        self._interactive = [t for t in self._tiers if t.is_interactive]
        self._knobs = {t.name: TierKnobs(t, tiers.controller.dry_run) for t in self._tiers}
        self._stats = {t.name: stats.get(t.name) or TierStats(t) for t in self._tiers}
        self._min_shares = MinShares(self._tiers)
        self._min_shares.inherit(min_shares)
        for tier in self._tiers:
            if tier.name in knobs and tiers.controller.feedback:
                self._knobs[tier.name].inherit(knobs[tier.name])
            if slos.get(tier.name) != tier.slo:
                self._stats[tier.name].retarget(tier)
        self._fixed = {t.name: self._fixed_budget(t) for t in self._tiers}

    # -- the inner loop ----------------------------------------------------------------------------------------

    def budgets(
        self,
        states: Sequence[RequestState],
        cost: StepCost,
        now: float,
        left_s: float = NEVER_S,
        decode_cost: StepCost | None = None,
    ) -> Budgets:
        """Return the budgets of all tiers for the next step.

        `states` are the requests of interactive tiers. `left_s` is what bulk may add to the step by their delay
        accounts. `decode_cost` is the cost of a step without prefills; None: the
        same `cost`.
        """
        decode_cost = decode_cost or cost
        self._cost, self._overloaded = cost, frozenset()
        protected = [state for state in states if not state.yields]
        any_yield = len(protected) < len(states)
        if not self._switches.feed_forward:
            return Budgets(self._fixed, cost, decode_cost, yielding=self._fixed if any_yield else {})
        work = InteractiveWork.of(protected, decode_cost)
        limits = step_limits(self._traffic(), work, cost, now, left_s)
        overloaded = (t for t in self._interactive if is_overloaded(t, limits.interactive, work, cost, now))
        self._overloaded = frozenset(tier.name for tier in overloaded)
        self._min_shares.is_overload = bool(self._overloaded)
        yielding = {t.name: self._bulk_budget(t, limits) for t in self._interactive} if any_yield else {}
        of_tier = {t.name: self._budget(t, limits, work, now) for t in self._tiers}
        return Budgets(of_tier, cost, decode_cost, yielding=yielding)

    def _budget(self, tier: Tier, limits: StepLimits, work: InteractiveWork, now: float) -> TierBudget:
        if tier.is_interactive:
            return self._interactive_budget(tier, replace(self._fixed[tier.name], limit=limits.interactive), work, now)
        if self._min_shares.is_due(tier.name, limits.min_share.base_s):
            return replace(
                self._fixed[tier.name],
                limit=limits.of_due(self._min_shares.due_s(tier.name), self._cost),
                min_share=self._min_shares.share(tier.name),
                is_starved=self._min_shares.is_due(tier.name, NEVER_S),
            )
        return self._bulk_budget(tier, limits)

    def _bulk_budget(self, tier: Tier, limits: StepLimits) -> TierBudget:
        """Return the budget of a bulk tier, or of the requests of an interactive tier that yield."""
        return replace(
            self._fixed[tier.name],
            limit=limits.bulk,
            added_s=limits.added_s(0.0 if tier.is_interactive else self._min_shares.urgency(tier.name)),
            alone_s=limits.alone_s,
            beside_s=limits.beside_s,
            kv_reserve=0.0 if tier.is_interactive else self.kv_reserve,
        )

    def _interactive_budget(self, tier: Tier, budget: TierBudget, work: InteractiveWork, now: float) -> TierBudget:
        """Return `budget` without the limits that keep SLOs, as far as they cannot be kept.

        If a first token is late, the batch size does not hold it back. If the tier is overloaded, its prefills run in
        order. In both an overload and a step that makes all next tokens late in any case, they may make it longer.
        """
        if any(s.tier.name == tier.name and deadline_s(s) < now for s in work.awaiting):
            budget = replace(budget, max_num_seqs=tier.pinned.batch_size or tier.batch_size.max)
        is_overloaded = tier.name in self._overloaded
        all_are_late = bool(work.decoding) and not budget.limit.base_s
        if is_overloaded or all_are_late:
            limit = replace(budget.limit, extra_s=self._overload_extra_s(tier))
            budget = replace(budget, overloaded=is_overloaded, limit=limit)
        return budget

    def _overload_extra_s(self, tier: Tier) -> float:
        """Return how much longer prefills of an overloaded tier make a step: its TTFT SLO, because it is efficient.

        If requests of a higher tier arrive, the step is short enough for them to be in time.
        """
        above = [t for t in self._interactive if t.priority > tier.priority and self._stats[t.name].rate_per_s > 0]
        own_s = self._stats[tier.name].prefills_s(self._cost.step_s)
        return min([own_s, *(FIRST_STEP_SHARE * self._stats[t.name].ttft_s(self._cost.step_s) for t in above)])

    def _fixed_budget(self, tier: Tier) -> TierBudget:
        """Return the part of a budget that does not depend on the step."""
        knobs, rate = self._knobs[tier.name], self._stats[tier.name].rate_per_s
        return TierBudget(
            max_num_seqs=int(knobs.batch_size.value),
            max_tokens=int(knobs.batch_tokens.value),
            max_wait_s=knobs.max_wait_ms.value / 1000,
            arrival_gap_s=1 / rate if rate > 0 else NEVER_S,
        )

    def _traffic(self) -> InteractiveTraffic | None:
        """Return the observations of all interactive tiers together; None if no tier is interactive."""
        if not self._interactive:
            return None
        services_s = ((t.max_slowdown, self._stats[t.name].service_s) for t in self._interactive if t.max_slowdown)
        return InteractiveTraffic(
            ttft_slo_s=min(self._stats[t.name].ttft_s(self._cost.step_s) for t in self._interactive),
            delay_s=min(((slowdown - 1) * s for slowdown, s in services_s if s is not None), default=NEVER_S),
            residual=WHOLE_STEP / (self._num_layers if self.suspends_steps else 1),
            margin=self._margin,
            overhead_s=self._overhead_s.value,
        )

    @property
    def suspends_steps(self) -> bool:
        """Whether a running step of bulk is suspended for an interactive arrival."""
        return self._engine_suspends and self._switches.suspend

    @property
    def measures_slowdown(self) -> bool:
        """Whether bulk is withheld in slots, to measure how it slows interactive requests down."""
        return self._switches.measure_slowdown and bool(self._interactive)

    # -- observations ------------------------------------------------------------------------------------------

    def observe_latency(
        self, tier: str, kind: str, seconds: float, now: float, bulk_s: float = 0.0, own_s: float = 0.0
    ) -> None:
        """Record a latency of one request.

        `kind` is "ttft", "itl" (a gap between two tokens), or "service" (the time from the first step to the first
        token). `bulk_s` is the part of `seconds` that the engine spent on bulk, `own_s` that on the request's own work.
        """
        self._stats[tier].add_latency(kind, seconds, now, bulk_s, own_s)

    def observe_arrivals(self, tier: str, count: int) -> None:
        self._stats[tier].arrivals.add(count)

    def observe_end(self, tier: str, met_slo: bool, now: float) -> None:
        self._stats[tier].add_end(met_slo, now)

    def observe_step(
        self,
        elapsed_s: float,
        predicted_s: float,
        used_s: Mapping[str, float],
        wanting: Iterable[str],
        now: float,
        overhead_s: float,
    ) -> None:
        """Record a finished step that took the engine `elapsed_s` and was planned to take `predicted_s`.

        `predicted_s` is 0 if the step did not run as planned. `used_s` is the part of `elapsed_s` that each tier used.
        `wanting` are the tiers that have work. `overhead_s` is the time that the host needed in addition.
        """
        self._min_shares.add_step(elapsed_s, used_s, [name for name in wanting if name in self._stats])
        self._overhead_s.add(overhead_s)
        if predicted_s:
            self._step_errors.add(now, False, elapsed_s / predicted_s)

    def observe_batch(self, sequences: Mapping[str, int]) -> None:
        """Record how many sequences of each tier a step had."""
        for tier, count in sequences.items():
            if tier in self._stats:
                self._stats[tier].add_step(count)

    def set_urgency(self, tier: str, urgency: float) -> None:
        """Set the urgency of the tier's most urgent request, in [0, 1]."""
        self._min_shares.set_urgency(tier, urgency)

    # -- the outer loop ----------------------------------------------------------------------------------------

    def update(self, load: Load, now: float) -> list[Decision]:
        """Move the knobs and return the moves. Call every `UPDATE_S`."""
        for stats in self._stats.values():
            stats.rate_per_s = stats.arrivals.update(now)
        ended = (self._stats[tier.name].attainment(now) is not None for tier in self._interactive)
        self._is_bulk_alone = self._is_absent(load) and not any(ended)
        error = self._step_errors.p99(now)
        if error is not None:
            self._margin = min(MAX_MARGIN, max(MIN_MARGIN, 1 - 1 / error))
        decisions = self._move_knobs(load, now) if self._switches.feedback else []
        self._fixed = {t.name: self._fixed_budget(t) for t in self._tiers}
        return decisions

    def _move_knobs(self, load: Load, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for tier in self._tiers:
            knobs, stats = self._knobs[tier.name], self._stats[tier.name]
            if tier.is_interactive:
                decisions += move_interactive(tier, knobs, stats, load, tier.name in self._overloaded, now)
            else:
                interactive = self._interactive_load(stats.last_cut_s, load, now)
                decisions += move_bulk(tier, knobs, stats, load, interactive, now)
        self._decisions.extend((now, decision) for decision in decisions)
        return decisions

    def _is_absent(self, load: Load) -> bool:
        """Return whether no interactive request is there."""
        return not any(load.held.get(tier.name) or load.waiting.get(tier.name) for tier in self._interactive)

    def _interactive_load(self, since_s: float, load: Load, now: float) -> InteractiveLoad:
        shares = [self._stats[tier.name].worst_bulk_miss_share(now, since_s) for tier in self._interactive]
        return InteractiveLoad(
            is_absent=self._is_absent(load),
            was_absent=self._is_bulk_alone,
            miss_share=max((share for share in shares if share is not None), default=None),
        )

    # -- readings ----------------------------------------------------------------------------------------------

    @property
    def kv_reserve(self) -> float:
        """The share of all KV blocks that a bulk sequence leaves free when it starts."""
        return ALONE_KV_RESERVE if self._is_bulk_alone else KV_RESERVE

    def max_num_seqs(self, tier: str) -> int:
        return int(self._knobs[tier].batch_size.value)

    def outputs(self, now: float) -> dict[str, TierOutputs]:
        return {
            name: TierOutputs(
                batch_size=int(knobs.batch_size.value),
                max_wait_s=knobs.max_wait_ms.value / 1000,
                margin=self._margin,
                ttft_p99_s=self._stats[name].p99_s("ttft", now),
                itl_p99_s=self._stats[name].p99_s("itl", now),
                attainment=self._stats[name].attainment(now),
                batch_tokens=int(knobs.batch_tokens.value),
                arrivals_per_s=self._stats[name].rate_per_s,
                is_overloaded=name in self._overloaded,
            )
            for name, knobs in self._knobs.items()
        }

    def explain(self, now: float) -> dict[str, Any]:
        """Return the controller's state and its newest decisions with their reasons, as plain data.

        The keys are part of the public API. Times are in seconds.
        """
        traffic = self._traffic()
        return {
            "switches": self._switches.model_dump(),
            "host_overhead_s": self._overhead_s.value,
            "margin": self._margin,
            "overloaded": sorted(self._overloaded),
            "bulk_step_s": bulk_alone_s(traffic, self._cost, traffic.residual) if traffic else None,
            "tiers": {
                name: explain_tier(name, knobs, self._stats[name], self._min_shares, now)
                for name, knobs in self._knobs.items()
            },
            "decisions": [{"ago_s": now - at_s, **asdict(decision)} for at_s, decision in self._decisions],
        }
