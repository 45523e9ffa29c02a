"""The SLA controller: turns observed latency into what each tier may do in the next step.

Two loops. The inner one, `budgets`, is feed-forward and runs every step: bulk leaves the batch while a first token is
awaited above it, and otherwise fills the step only as far as the earliest next-token deadline allows. The outer one,
`update`, runs a few times a second and moves the knobs (batch size, max-wait) inside the bounds of tiers.yaml, from
p99 over a window. Every move is a `Decision` that says which signal made it.

Knows tiers, latencies and predicted costs; reads no clock, touches no queue, no engine, no metrics.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.latency_model import StepCost
from scheduler.batch import Budgets, TierBudget
from scheduler.config import Tier, TierSet
from scheduler.states import RequestState
from scheduler.windows import ArrivalRate, LatencyWindow, ShareWindow

UPDATE_S = 0.5
MISS_TARGET = 0.01  # ε: the share that a p99 promise lets miss
MARGIN_UP = 0.05  # a miss
MARGIN_MAX = 0.6
QUIET_SHARE = 0.03  # of the TTFT target: how long an arrival may find the engine busy with bulk
AMORTISE = 3.0  # a bulk step may always last this many times the fixed cost of a step: less is mostly overhead
DEBT_MAX_S = 1.0  # of engine time owed to a floor: no burst after a long flood
KV_HIGH, KV_LOW = 0.85, 0.70


@dataclass(frozen=True, slots=True)
class Decision:
    """One move of one knob, and why."""

    tier: str
    knob: str  # "batch_size" | "max_wait_ms"
    old: float
    new: float
    signal: str
    reason: str

    @property
    def direction(self) -> str:
        return "up" if self.new > self.old else "down"


@dataclass(frozen=True, slots=True)
class Load:
    """What the outer loop sees of the present, by tier."""

    kv_usage: float
    held: Mapping[str, int]  # claimed and not ended
    waiting: Mapping[str, int]  # in the queue


class _Knobs:
    """One tier's observations and the present values of its knobs. Owner: the controller."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.batch_size = tier.batch_size.start
        self.max_wait_ms = float(tier.max_wait_ms.start)
        self.margin = 0.0
        self.ttft = LatencyWindow((tier.slo.ttft_p99_ms or math.inf) / 1000)
        self.itl = LatencyWindow((tier.slo.itl_p99_ms or math.inf) / 1000)
        self.attainment = ShareWindow()
        self.arrivals = ArrivalRate()
        self.rate_per_s = 0.0
        self.cut_at_s = float("-inf")  # misses before it have been answered
        self.debt_s = 0.0  # engine time owed by the tier's floor


class SLAController:
    def __init__(self, tiers: TierSet) -> None:
        self._knobs = {tier.name: _Knobs(tier) for tier in tiers.by_priority}
        interactive = [t for t in tiers.by_priority if t.is_interactive]
        targets = [t.slo.ttft_p99_ms / 1000 for t in interactive if t.slo.ttft_p99_ms]
        self._quiet_s = QUIET_SHARE * min(targets) if targets else float("inf")

    # -- the inner loop ----------------------------------------------------------------------------------------

    def budgets(self, states: Sequence[RequestState], cost: StepCost, now: float) -> Budgets:
        """What each tier may do in the step about to be planned."""
        awaited = [s for s in states if s.tier.is_interactive and s.awaits_first_token]
        decoding = [s for s in states if s.tier.is_interactive and not s.awaits_first_token]
        first_token_of = max((s.tier.priority for s in awaited), default=None)
        slack_s = self._slack(decoding, now)
        budgets = {}
        for name, knobs in self._knobs.items():
            owed = knobs.tier.floor > 0 and knobs.debt_s >= min(self._bulk_step(cost), DEBT_MAX_S)
            above = first_token_of is not None and first_token_of > knobs.tier.priority
            budgets[name] = TierBudget(
                max_num_seqs=knobs.batch_size,
                max_wait_s=knobs.max_wait_ms / 1000,
                step_time_s=self._step_time(knobs, cost, slack_s),
                paused=above and not knobs.tier.is_interactive and not owed,
                owed=owed,
            )
        return Budgets(tiers=budgets, cost=cost)

    def _step_time(self, knobs: _Knobs, cost: StepCost, slack_s: float | None) -> float:
        """How long a step may be predicted to take when it holds work of this tier."""
        if knobs.tier.is_interactive:
            target_ms = knobs.tier.slo.itl_p99_ms
            return float("inf") if slack_s is None or target_ms is None else target_ms / 1000
        bulk_s = self._bulk_step(cost)
        return bulk_s if slack_s is None else min(bulk_s, max(slack_s, cost.step_s))

    def _bulk_step(self, cost: StepCost) -> float:
        margin = max((k.margin for k in self._knobs.values()), default=0.0)
        return max(self._quiet_s * (1 - margin), AMORTISE * cost.step_s)

    def _slack(self, decoding: Iterable[RequestState], now: float) -> float | None:
        """Seconds until the earliest next-token deadline; None when no interactive sequence decodes."""
        slacks = []
        for state in decoding:
            target_ms = state.tier.slo.itl_p99_ms
            if target_ms is not None and state.last_token_s is not None:
                cap_s = target_ms / 1000 * (1 - self._knobs[state.tier.name].margin)
                slacks.append(state.last_token_s + cap_s - now)
        return min(slacks, default=None)

    # -- observations ------------------------------------------------------------------------------------------

    def observe_latency(self, tier: str, kind: str, seconds: float, now: float) -> None:
        """A TTFT or ITL ("ttft", "itl") of one request."""
        knobs = self._knobs[tier]
        slo = knobs.tier.slo
        window, target_ms = (knobs.ttft, slo.ttft_p99_ms) if kind == "ttft" else (knobs.itl, slo.itl_p99_ms)
        if target_ms is None:
            return
        window.add(now, seconds)
        # Quantile tracking: in balance when the share of misses is MISS_TARGET; faster up than down.
        missed = seconds * 1000 > target_ms
        step = MARGIN_UP if missed else -MARGIN_UP * MISS_TARGET
        knobs.margin = min(MARGIN_MAX, max(0.0, knobs.margin + step))

    def observe_arrivals(self, tier: str, count: int) -> None:
        self._knobs[tier].arrivals.add(count)

    def observe_end(self, tier: str, met_slo: bool, now: float) -> None:
        self._knobs[tier].attainment.add(now, met_slo)

    def observe_step(self, elapsed_s: float, ran: Mapping[str, int], wanting: Iterable[str]) -> None:
        """Keep the floors' books: `ran` sequences a tier in a step of `elapsed_s`; `wanting` tiers have work."""
        total = sum(ran.values())
        for name in wanting:
            knobs = self._knobs[name]
            used_s = elapsed_s * ran.get(name, 0) / total if total else 0.0
            owed_s = knobs.debt_s + knobs.tier.floor * elapsed_s - used_s
            knobs.debt_s = min(max(owed_s, 0.0), DEBT_MAX_S)

    # -- the outer loop ----------------------------------------------------------------------------------------

    def update(self, load: Load, now: float) -> list[Decision]:
        """Move the knobs; call every `UPDATE_S`."""
        decisions: list[Decision | None] = []
        for knobs in self._knobs.values():
            knobs.rate_per_s = knobs.arrivals.update(now)
            if knobs.tier.is_interactive:
                decisions += self._update_interactive(knobs, load, now)
            else:
                decisions += self._update_bulk(knobs, load, now)
        return [d for d in decisions if d is not None]

    def _worst_miss_share(self, now: float, since_s: float) -> float | None:
        """The worst share of misses among interactive tiers since `since_s`; None: too little data."""
        shares = [window.miss_share(now, since_s) for k in self._knobs.values() for window in (k.ttft, k.itl)]
        return max((share for share in shares if share is not None), default=None)

    def _no_interactive(self, load: Load) -> bool:
        names = [k.tier.name for k in self._knobs.values() if k.tier.is_interactive]
        return all(load.held.get(n, 0) + load.waiting.get(n, 0) == 0 for n in names)

    def _update_interactive(self, knobs: _Knobs, load: Load, now: float) -> list[Decision | None]:
        name, slo = knobs.tier.name, knobs.tier.slo
        itl, ttft = knobs.itl.p99(now, since_s=knobs.cut_at_s), knobs.ttft.p99(now)
        itl_ratio = itl * 1000 / slo.itl_p99_ms if itl is not None and slo.itl_p99_ms else None
        ttft_ratio = ttft * 1000 / slo.ttft_p99_ms if ttft is not None and slo.ttft_p99_ms else None
        demand = load.waiting.get(name, 0) > 0 or load.held.get(name, 0) >= knobs.batch_size
        moves: list[Decision | None] = []
        if itl_ratio is not None and itl_ratio > 1:
            reason = "tokens come too slowly: fewer sequences a step"
            moves.append(self._cut(knobs, knobs.batch_size * 0.8, "itl_p99", reason, now))
        elif demand and (slo.itl_p99_ms is None or _below(itl_ratio, 0.7)):
            reason = "requests wait and tokens come in time: more sequences a step"
            moves.append(self._set_batch_size(knobs, knobs.batch_size + 2, "queue", reason))
        if ttft_ratio is not None and ttft_ratio > 1:
            reason = "first tokens are late: wait less"
            moves.append(self._set_max_wait(knobs, knobs.max_wait_ms / 2 - 0.5, "ttft_p99", reason))
        elif itl_ratio is not None and ttft_ratio is not None and itl_ratio > 0.9 and ttft_ratio < 0.5:
            reason = "prefills interrupt decodes and first tokens have room: start more of them together"
            step_ms = knobs.tier.max_wait_ms.max / 10
            moves.append(self._set_max_wait(knobs, knobs.max_wait_ms + step_ms, "itl_p99", reason))
        return moves

    def _update_bulk(self, knobs: _Knobs, load: Load, now: float) -> list[Decision | None]:
        name, held = knobs.tier.name, load.held.get(knobs.tier.name, 0)
        demand = load.waiting.get(name, 0) > 0 or held >= knobs.batch_size
        cut_shows = held <= knobs.batch_size  # the last cut has had its effect: only then cut again
        alone = self._no_interactive(load)
        misses = self._worst_miss_share(now, since_s=knobs.cut_at_s)
        moves: list[Decision | None] = []
        if cut_shows and held and misses is not None and misses > 2 * MISS_TARGET and not alone:
            reason = "interactive tiers miss their targets"
            moves.append(self._cut(knobs, knobs.batch_size * 0.5, "slo_misses", reason, now))
        elif cut_shows and held and load.kv_usage > KV_HIGH:
            reason = "KV blocks run out"
            moves.append(self._cut(knobs, min(knobs.batch_size, held) * 0.8, "kv_usage", reason, now))
        elif demand and load.kv_usage < KV_LOW and (alone or _below(misses, MISS_TARGET / 2)):
            reason = "work waits and nobody above is harmed"
            moves.append(self._set_batch_size(knobs, knobs.batch_size + 2, "queue", reason))
        moves.append(self._fill_wait(knobs))
        return moves

    def _fill_wait(self, knobs: _Knobs) -> Decision | None:
        """Wait as long as a batch takes to fill, if that is within bounds; in low traffic flush at once."""
        bounds = knobs.tier.max_wait_ms
        if knobs.rate_per_s <= 0:
            return None
        fill_ms = 1000 * knobs.batch_size / knobs.rate_per_s
        goal_ms = fill_ms if fill_ms <= bounds.max else bounds.min
        if abs(goal_ms - knobs.max_wait_ms) < 0.1 * max(bounds.max, 1.0):  # dead band
            return None
        halfway_ms = (knobs.max_wait_ms + goal_ms) / 2  # slew limit
        return self._set_max_wait(knobs, halfway_ms, "arrival_rate", "the time a batch takes to fill")

    def _cut(self, knobs: _Knobs, value: float, signal: str, reason: str, now: float) -> Decision | None:
        knobs.cut_at_s = now
        return self._set_batch_size(knobs, value, signal, reason)

    def _set_batch_size(self, knobs: _Knobs, value: float, signal: str, reason: str) -> Decision | None:
        bounds = knobs.tier.batch_size
        old, new = knobs.batch_size, min(bounds.max, max(bounds.min, int(value)))
        knobs.batch_size = new
        return Decision(knobs.tier.name, "batch_size", old, new, signal, reason) if new != old else None

    def _set_max_wait(self, knobs: _Knobs, value_ms: float, signal: str, reason: str) -> Decision | None:
        bounds = knobs.tier.max_wait_ms
        old, new = knobs.max_wait_ms, min(bounds.max, max(bounds.min, value_ms))
        knobs.max_wait_ms = new
        return Decision(knobs.tier.name, "max_wait_ms", old, new, signal, reason) if new != old else None

    # -- what others may see -----------------------------------------------------------------------------------

    def outputs(self, now: float) -> dict[str, "TierOutputs"]:
        return {
            name: TierOutputs(
                batch_size=k.batch_size,
                max_wait_s=k.max_wait_ms / 1000,
                margin=k.margin,
                ttft_p99_s=k.ttft.p99(now),
                itl_p99_s=k.itl.p99(now),
                attainment=k.attainment.share(now),
            )
            for name, k in self._knobs.items()
        }


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


def _below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit
