"""Step limits: the longest predicted time in seconds that a step may take. The controller's inner loop uses them.

Three limits hold at the same time:

| because of | limit |
|---|---|
| deadlines | a step with interactive decodes ends before the first of their next tokens is due: the hard limit |
| requests that are there | bulk adds what their delay accounts have left (scheduler/control/delay_account.py) |
| requests that may arrive | bulk alone delays a first token by the same share as whole answers |

All functions are pure: they compute limits from request states, predicted costs and observed rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.deadlines import deadline_s, is_too_long
from scheduler.request_state import RequestState

# For interactive tiers.
# Share of the TTFT SLO: the limit of a step without interactive decodes, so that a request that arrives during it can
# be in time.
FIRST_STEP_SHARE = 0.25
# Share of the step: the time that prefills may always add to a step. Without it, late decodes would starve prefills.
PREFILL_EXTRA_SHARE = 0.25
LATE_SHARE = 0.5  # share of the time left for prefills that is kept for prefills whose deadline is already missed
# Multiple of the TTFT SLO. A tier is overloaded if the last of its awaited first tokens would come later than this.
OVERLOAD = 1.5

# For bulk tiers.
WHOLE_STEP = 0.5  # mean share of a running step that an arrival waits for, if the step runs to its end
LEAST_WORK = 1.0  # multiple of a step's fixed cost: the work that a bulk step may always hold, whatever it delays


@dataclass(frozen=True, slots=True)
class StepLimit:
    """The longest predicted time that a step may have after the work of one tier was added to it.

    `base_s` is the limit that is known before the step is formed. The methods compute the limits that depend on the
    step itself. Their argument `planned_s` is the predicted time of the step with the work planned so far.
    """

    base_s: float = NEVER_S
    # The tier may add this share of `planned_s`, and this many seconds, even if the step then exceeds `base_s`.
    extra_share: float = 0.0
    extra_s: float = 0.0

    def total_s(self, planned_s: float) -> float:
        """Return the limit of the step: `base_s`, or the limit with the extra if that is longer."""
        return max(self.base_s, (1 + self.extra_share) * planned_s + self.extra_s)

    def at_most(self, limit_s: float) -> "StepLimit":
        """Return this limit, but not above `limit_s`."""
        return replace(self, base_s=min(self.base_s, limit_s))


def beside_min_shares_s(work_s: float, share: float, cost: StepCost) -> float:
    """Return how long prefills may make a step in which `work_s` seconds of work serve min shares of `share` in total.

    In a longer step, this work would be less than the share. A tier with few sequences has little work for a step, and
    would get its share in short steps only, which compute hardly anything of the others. So such a small step's work
    counts as done.
    """
    return max(work_s, LEAST_WORK * cost.step_s) / share if share else NEVER_S


def first_limit_s(limit_s: float, planned_s: float) -> float:
    """Return the limit for the prefills that go first, if late prefills wait too.

    The rest of the time up to `limit_s` is for the late prefills.
    """
    return limit_s - LATE_SHARE * max(0.0, limit_s - planned_s) if limit_s < NEVER_S else limit_s


@dataclass(frozen=True, slots=True)
class InteractiveTraffic:
    """The SLOs of all interactive tiers and the observations of their requests, from which step limits are computed."""

    ttft_slo_s: float  # the shortest TTFT SLO that is within reach
    delay_s: float  # mean delay that bulk alone may cause to a first token; NEVER_S: only the SLO limits it
    residual: float  # mean share of a running step of bulk alone for which a request that arrives waits
    margin: float  # share of the time until the next token that is kept in reserve
    overhead_s: float  # time that the host needs for a step in addition to the engine's time


@dataclass(frozen=True, slots=True)
class InteractiveWork:
    """The interactive requests that a worker holds, as far as step limits depend on them."""

    decoding: Sequence[RequestState]  # have their first token
    awaiting: Sequence[RequestState]  # await their first token
    decodes_s: float  # predicted time of a step with only the decodes of `decoding`; at least a step's fixed cost

    @classmethod
    def of(cls, states: Sequence[RequestState], cost: StepCost) -> "InteractiveWork":
        decoding = [s for s in states if not s.awaits_first_token]
        decodes_s = cost.step(sum(cost.decode(s.num_computed_tokens) for s in decoding))
        return cls(decoding, [s for s in states if s.awaits_first_token], decodes_s)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of one step for each kind of tier that adds work to it."""

    interactive: StepLimit
    bulk: StepLimit  # deadlines of interactive tokens
    min_share: StepLimit  # the least for a bulk tier whose min share is due
    alone_s: float = NEVER_S  # of a step of bulk alone, because of requests that may arrive
    beside_s: float = NEVER_S  # what bulk may add to any other step, because of requests that may arrive
    left_s: float = NEVER_S  # what bulk may add by the delay accounts of the requests that are there

    def of_due(self, due_s: float, cost: StepCost) -> StepLimit:
        """Return the limit for a bulk tier to which `due_s` seconds are due: all of it, if tokens are in time then."""
        in_time_s = self.interactive.base_s or NEVER_S  # 0: they are late in any case
        return StepLimit(max(self.min_share.base_s, min(cost.step_s + due_s, in_time_s)))

    def added_s(self, urgency: float) -> float:
        """Return the time that a bulk tier may add to the interactive part of the step, up to `beside_s`.

        With an urgency of 1, the delay accounts do not count.
        """
        left_s = max(0.0, self.left_s)
        return left_s if left_s >= self.beside_s else (1 - urgency) * left_s + urgency * self.beside_s


def step_limits(
    traffic: InteractiveTraffic | None, work: InteractiveWork, cost: StepCost, now: float, left_s: float
) -> StepLimits:
    """Return the limits of the next step. `traffic` is None if no tier is interactive.

    `left_s` is what bulk may add to the step by the delay accounts of the requests that are there.
    """
    guaranteed = StepLimit(_least_s(cost))
    if traffic is None:
        return StepLimits(StepLimit(), StepLimit(), guaranteed)
    hard_s = _hard_limit_s(work, traffic, now)
    return StepLimits(
        StepLimit(hard_s, extra_share=PREFILL_EXTRA_SHARE),
        StepLimit(hard_s if work.decoding else NEVER_S),
        guaranteed,
        bulk_alone_s(traffic, cost, traffic.residual),
        bulk_alone_s(traffic, cost, WHOLE_STEP),
        left_s,
    )


def _hard_limit_s(work: InteractiveWork, traffic: InteractiveTraffic, now: float) -> float:
    """Return the longest time that the step may take so that the next interactive tokens are in time.

    A token that is late even if the step holds nothing but decodes is no reason for a short step.
    """
    if not work.decoding:
        return FIRST_STEP_SHARE * traffic.ttft_slo_s
    itl_s = min(s.tier.slo.itl_p99_ms or NEVER_S for s in work.decoding) / 1000
    lefts_s = [itl_s, *(deadline_s(s) - now for s in work.decoding)]
    left_s = min((left_s for left_s in lefts_s if left_s >= work.decodes_s), default=0.0)
    return max(0.0, left_s * (1 - traffic.margin) - traffic.overhead_s)


def bulk_alone_s(traffic: InteractiveTraffic, cost: StepCost, residual: float) -> float:
    """Return the longest time that a step may take if it holds only bulk.

    In a longer step, bulk would delay a request that arrives too much, until the step ends or is suspended. `residual`
    is the mean share of the step for which the request waits.
    """
    for_slo_s = min(1.0, FIRST_STEP_SHARE / (2 * residual)) * traffic.ttft_slo_s
    return max(_least_s(cost), min(for_slo_s, cost.step_s + traffic.delay_s / residual))


def _least_s(cost: StepCost) -> float:
    """Return the time that a bulk step may always last, because a shorter step would be mostly overhead."""
    return max((1 + LEAST_WORK) * cost.step_s, cost.step(0.0))


def is_overloaded(tier: Tier, limit: StepLimit, work: InteractiveWork, cost: StepCost, now: float) -> bool:
    """Return whether `tier` cannot keep its SLO: a first token would come later than `OVERLOAD` times its target.

    The prediction is the time that all prefills of the tier take in steps as long as `limit`, or the age of the oldest
    request if that is longer. Prompts that are too long for the SLO in any case do not count. A tier is never
    overloaded while requests of a higher tier decode: their SLO goes first.
    """
    if tier.slo.ttft_p99_ms is None or any(s.tier.priority > tier.priority for s in work.decoding):
        return False
    awaiting = [s for s in work.awaiting if s.tier.name == tier.name and not is_too_long(s, cost)]
    if not awaiting:
        return False
    prefills_s = sum(cost.prefill(s.num_uncomputed, s.num_computed_tokens) for s in awaiting)
    step_s = limit.total_s(work.decodes_s)
    left_s = step_s - work.decodes_s  # of each step, for prefills
    last_s = prefills_s * step_s / left_s if left_s > 0 else 0.0
    oldest_s = now - min(s.arrived_s for s in awaiting)
    return max(oldest_s, last_s) * 1000 > OVERLOAD * tier.slo.ttft_p99_ms
