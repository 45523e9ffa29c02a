"""The SLA controller: turns observed latency into what each tier may do in the next step.

Two loops. The inner one, `budgets`, is feed-forward and runs every step: interactive sequences have deadlines for their
next token, and bulk takes part in the step as far as these allow; while a first token is awaited above it, it hardly
does. The outer one, `update`, runs a few times a second and moves the knobs (batch size, max-wait) inside the bounds
of tiers.yaml (scheduler.control.feedback). Every move is a `Decision` that says which signal made it.

Knows tiers, latencies and predicted costs; reads no clock, touches no queue, no engine, no metrics.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.interface import StepEviction
from engine.step_time.ewma import Ewma
from engine.step_time.model import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier, TierSet
from scheduler.control import feedback
from scheduler.control.budget import Budgets, TierBudget
from scheduler.control.feedback import UPDATE_S, Load, Surroundings
from scheduler.control.knobs import Decision, TierKnobs
from scheduler.control.kv_reserve import KVReserve
from scheduler.control.min_share import DeficitCounter
from scheduler.control.step_limit import (
    AMORTISE,
    MAX_PREFILL_SLOWDOWN,
    PREFILL_EXTRA_SHARE,
    InteractiveTraffic,
    StepLimit,
    bulk_limit_s,
    decodes_limit_s,
    prefill_only_limit_s,
)
from scheduler.control.tier_stats import TierStats
from scheduler.deadlines import itl_cap_s
from scheduler.request_state import RequestState

OVERHEAD_WEIGHT = 0.05
NUM_DECISIONS = 200  # remembered


@dataclass(frozen=True, slots=True)
class TierOutputs:
    """The controller's view of one tier: its knobs and margin, and of the last 30 seconds the observed p99 and the
    share of ended requests that met all targets (None: too little data)."""

    batch_size: int
    max_wait_s: float
    margin: float
    ttft_p99_s: float | None
    itl_p99_s: float | None
    attainment: float | None
    batch_tokens: int = 0
    arrivals_per_s: float = 0.0


class SLAController:
    def __init__(self, tiers: TierSet, engine_eviction: StepEviction = StepEviction.NOTHING) -> None:
        self._engine_eviction = engine_eviction
        self._adopt(tiers)
        self._knobs = {t.name: TierKnobs(t, tiers.controller.dry_run) for t in self._tiers}
        self._seen = {t.name: TierStats(t) for t in self._tiers}
        self._floors = DeficitCounter(self._tiers)
        self._reserve = KVReserve()
        self._overhead_s = Ewma(OVERHEAD_WEIGHT)
        self._bulk_ran_s = -NEVER_S
        self._cost = StepCost()
        self._decisions: deque[tuple[float, Decision]] = deque(maxlen=NUM_DECISIONS)

    def _adopt(self, tiers: TierSet) -> None:
        self._tiers = tiers.by_priority
        self._switches = tiers.controller
        self._interactive = [t for t in self._tiers if t.is_interactive]

    @property
    def step_eviction(self) -> StepEviction:
        """What bulk may leave, as far as the engine can."""
        return self._engine_eviction if self._switches.shed else StepEviction.NOTHING

    def reconfigure(self, tiers: TierSet) -> None:
        """New bounds, promises, pins and switches; what was learned stays, as far as they allow."""
        before, seen, floors = self._knobs, self._seen, self._floors
        promises = {tier.name: tier.slo for tier in self._tiers}
        self._adopt(tiers)
        self._knobs = {t.name: TierKnobs(t, tiers.controller.dry_run) for t in self._tiers}
        self._seen = {t.name: seen.get(t.name) or TierStats(t) for t in self._tiers}
        self._floors = DeficitCounter(self._tiers)
        self._floors.take_over(floors)
        for tier in self._tiers:
            if tier.name in before and tiers.controller.feedback:
                self._knobs[tier.name].take_over(before[tier.name])
            if promises.get(tier.name) != tier.slo:
                self._seen[tier.name].retarget(tier)

    # -- the inner loop ----------------------------------------------------------------------------------------

    def budgets(self, states: Sequence[RequestState], cost: StepCost, now: float) -> Budgets:
        """What each tier may do in the step about to be planned. `states`: the interactive ones."""
        self._cost = cost
        if not self._switches.feed_forward:
            return Budgets({t.name: self._fixed(t) for t in self._tiers}, cost)
        decoding = [s for s in states if not s.awaits_first_token]
        awaited = max((s.tier.priority for s in states if s.awaits_first_token), default=None)
        interactive_s = self._interactive_limit_s(decoding, now)
        bulk_s = self._bulk_limit_s(cost, decoding, interactive_s)
        tiers = {}
        for tier in self._tiers:
            if tier.is_interactive:
                limit = StepLimit(interactive_s, extra_share=PREFILL_EXTRA_SHARE)
                tiers[tier.name] = replace(self._fixed(tier), limit=limit)
            else:
                limit = StepLimit(bulk_s, extra_share=MAX_PREFILL_SLOWDOWN, hard_limit_s=interactive_s)
                tiers[tier.name] = self._bulk_budget(tier, cost, limit, awaited)
        return Budgets(tiers, cost)

    def _bulk_budget(self, tier: Tier, cost: StepCost, limit: StepLimit, awaited: int | None) -> TierBudget:
        """`awaited`: the highest priority of a request that awaits its first token."""
        small_s = AMORTISE * cost.step_s
        if self._floors.has_deficit(tier.name, small_s):
            return replace(self._fixed(tier), limit=StepLimit(small_s), guaranteed=True)
        return replace(
            self._fixed(tier),
            limit=limit,
            decodes_only=awaited is not None and awaited > tier.priority,
            reserve_blocks=self._reserve.num_blocks if self._interactive else 0,
        )

    def _fixed(self, tier: Tier) -> TierBudget:
        """Return the part of a tier's budget that does not depend on the step."""
        knobs, rate = self._knobs[tier.name], self._seen[tier.name].rate_per_s
        return TierBudget(
            max_num_seqs=int(knobs.batch_size.value),
            max_tokens=int(knobs.batch_tokens.value),
            max_wait_s=knobs.max_wait_ms.value / 1000,
            gap_s=1 / rate if rate > 0 else NEVER_S,
        )

    def _interactive_limit_s(self, decoding: Sequence[RequestState], now: float) -> float:
        if not decoding:
            slos_ms = (t.slo.ttft_p99_ms or NEVER_S for t in self._interactive)
            return prefill_only_limit_s(min(slos_ms, default=NEVER_S) / 1000)
        margin = max(self._seen[name].margin_of["itl"].value for name in {s.tier.name for s in decoding})
        return decodes_limit_s(decoding, now, margin, self._overhead_s.value)

    def _bulk_limit_s(self, cost: StepCost, decoding: Sequence[RequestState], interactive_s: float) -> float:
        if not self._interactive:
            return NEVER_S
        if not decoding:
            return bulk_limit_s(self._traffic(), self.step_eviction, cost)
        decodes_s = cost.step(sum(cost.decode(s.num_computed_tokens) for s in decoding))
        bulk_s = bulk_limit_s(self._traffic(), self.step_eviction, cost, decodes_s, itl_cap_s(decoding))
        return max(min(interactive_s, bulk_s), cost.step_s)

    def _traffic(self) -> InteractiveTraffic:
        seen = [self._seen[tier.name] for tier in self._interactive]
        services_s = (s.expected_service_s for s in seen)
        return InteractiveTraffic(
            service_s=min((s for s in services_s if s is not None), default=NEVER_S),
            arrivals_per_s=sum(s.rate_per_s for s in seen),
            ttft_margin=max((s.margin_of["ttft"].value for s in seen), default=0.0),
        )

    # -- observations ------------------------------------------------------------------------------------------

    def observe_latency(self, tier: str, kind: str, seconds: float, now: float, bulk_s: float = 0.0) -> None:
        """A TTFT or ITL ("ttft", "itl") of one request, `bulk_s` of which the engine spent on bulk, or the time from
        its first step to its first token ("service")."""
        if kind == "service":
            self._seen[tier].add_service(seconds)
        else:
            self._seen[tier].add_latency(kind, seconds, now, bulk_s)

    def observe_arrivals(self, tier: str, count: int) -> None:
        self._seen[tier].arrivals.add(count)

    def observe_end(self, tier: str, met_slo: bool, gaps: int, now: float) -> None:
        """A request ended, with so many gaps between its tokens."""
        self._seen[tier].add_end(met_slo, gaps, now)

    def observe_step(
        self,
        elapsed_s: float,
        used_s: Mapping[str, float],
        wanting: Iterable[str],
        now: float,
        overhead_s: float,
    ) -> None:
        """A step is done: it took the engine `elapsed_s`, of which each tier used so much, and the host `overhead_s`
        more; `wanting` tiers have work."""
        self._floors.enter(elapsed_s, used_s, [name for name in wanting if name in self._seen])
        promised = {tier.name for tier in self._interactive}
        if sum(s for tier, s in used_s.items() if tier not in promised) > 2 * MAX_PREFILL_SLOWDOWN * elapsed_s:
            self._bulk_ran_s = now
        self._overhead_s.add(overhead_s)

    def observe_blocks(self, held_by_interactive: int, num_blocks: int) -> None:
        """KV blocks, every `UPDATE_S`."""
        self._reserve.observe(held_by_interactive, num_blocks)

    def set_urgency(self, tier: str, urgency: float) -> None:
        """How much of a tier's work would miss its deadline, or has waited too long: in [0, 1]."""
        self._floors.set_urgency(tier, urgency)

    # -- the outer loop ----------------------------------------------------------------------------------------

    def update(self, load: Load, now: float) -> list[Decision]:
        """Move the knobs; call every `UPDATE_S`."""
        for seen in self._seen.values():
            seen.rate_per_s = seen.arrivals.update(now)
        if not self._switches.feedback:
            return []
        decisions: list[Decision] = []
        for tier in self._tiers:
            knobs, seen = self._knobs[tier.name], self._seen[tier.name]
            if tier.is_interactive:
                decisions += feedback.move_interactive(tier, knobs, seen, load, now)
            else:
                decisions += feedback.move_bulk(tier, knobs, seen, load, self._around(seen.answered_s, load, now), now)
        self._decisions.extend((now, decision) for decision in decisions)
        return decisions

    def _around(self, since_s: float, load: Load, now: float) -> Surroundings:
        names = [tier.name for tier in self._interactive]
        shares = [self._seen[name].worst_bulk_miss_share(now, since_s) for name in names]
        return Surroundings(
            alone=all(load.held.get(n, 0) + load.waiting.get(n, 0) == 0 for n in names),
            misses=max((share for share in shares if share is not None), default=None),
            took_part=now - self._bulk_ran_s < 2 * UPDATE_S,
        )

    @property
    def kv_reserve_blocks(self) -> int:
        return self._reserve.num_blocks

    def max_num_seqs(self, tier: str) -> int:
        return int(self._knobs[tier].batch_size.value)

    # -- what others may see -----------------------------------------------------------------------------------

    def outputs(self, now: float) -> dict[str, TierOutputs]:
        return {tier.name: self._outputs(tier.name, now) for tier in self._tiers}

    def _outputs(self, name: str, now: float) -> TierOutputs:
        knobs, seen = self._knobs[name], self._seen[name]
        return TierOutputs(
            batch_size=int(knobs.batch_size.value),
            max_wait_s=knobs.max_wait_ms.value / 1000,
            margin=seen.margin,
            ttft_p99_s=seen.p99_s("ttft", now),
            itl_p99_s=seen.p99_s("itl", now),
            attainment=seen.attainment.share(now),
            batch_tokens=int(knobs.batch_tokens.value),
            arrivals_per_s=seen.rate_per_s,
        )

    def explain(self, now: float) -> dict[str, Any]:
        """Which signal moved which knob and why, as plain data: knobs, signals, and the last decisions. Seconds."""
        return {
            "switches": self._switches.model_dump(),
            "kv_reserve_blocks": self._reserve.num_blocks,
            "host_overhead_s": self._overhead_s.value,
            "bulk_step_s": _finite(self._bulk_limit_s(self._cost, (), NEVER_S)),
            "step_cost": asdict(self._cost),
            "tiers": {tier.name: self._explain_tier(tier, now) for tier in self._tiers},
            "decisions": [{"ago_s": now - at_s, **asdict(decision)} for at_s, decision in self._decisions],
        }

    def _explain_tier(self, tier: Tier, now: float) -> dict[str, Any]:
        seen = self._seen[tier.name]
        return {
            "knobs": {knob.name: knob.explain() for knob in self._knobs[tier.name]},
            "signals": {
                "ttft_p99_s": seen.p99_s("ttft", now),
                "itl_p99_s": seen.p99_s("itl", now),
                "miss_share": seen.worst_miss_share(now, seen.answered_s),
                "attainment": seen.attainment.share(now),
                "margins": {kind: margin.value for kind, margin in seen.margin_of.items()},
                "arrivals_per_s": seen.rate_per_s,
                "first_token_service_s": seen.service_s,
                "floor_share": self._floors.share(tier.name),
                "floor_debt_s": self._floors.deficit_s(tier.name),
            },
        }


def _finite(seconds: float) -> float | None:
    return None if seconds == NEVER_S else seconds
