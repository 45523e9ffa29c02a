"""Step limits: the longest predicted time in seconds that a step may take. The controller's inner loop uses them.

A step with interactive decodes must end before the first of their next tokens is due. Bulk may make a step only so much
longer that interactive requests hardly notice it. This holds for the requests that decode in the step, and for the
requests that arrive while the step runs.

All functions are pure: they compute limits from request states, predicted costs and observed rates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.interface import StepEviction
from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.deadlines import itl_cap_s, slack_s
from scheduler.request_state import RequestState

# For interactive tiers.
# Share of the TTFT SLO: the limit of a step without decodes, so that a request that arrives during it can be in time.
FIRST_STEP_SHARE = 0.25
# Share of the step: the time that prefills may always add to a step. Without it, late decodes would starve prefills.
PREFILL_EXTRA_SHARE = 0.25
LATE_SHARE = 0.2  # share of the time left for prefills that is kept for prefills whose deadline is already missed

# For bulk tiers.
# A bulk step may always last this many times the fixed cost of a step, since a shorter step is mostly overhead.
AMORTISE = 3.0
MAX_ITL_SHARE = 0.5  # share of the ITL SLO: the limit of a step with interactive decodes and bulk
# The limit of a step with interactive decodes and bulk, as a multiple of the time of a step with these decodes only.
MAX_DECODE_SLOWDOWN = 1.5
MAX_PREFILL_SLOWDOWN = 0.03  # share by which bulk may lengthen a step that computes a first token
LONGEST_STEP_S = 0.25  # the limit of a bulk step, in seconds, if no other limit is shorter
# Share of the usual time from first step to first token: the mean delay that bulk may cause to a request that arrives.
DELAY_SHARE = 0.07
# Mean share of a running bulk step for which a request that arrives must wait. Without mid-step eviction this is half
# of the step. If bulk can be evicted, its steps may be longer for the same mean delay.
MEAN_RESIDUAL = {StepEviction.NOTHING: 0.5, StepEviction.STEPS: 0.25, StepEviction.ROWS: 1 / 16}
# Share of bulk's time that mid-step evictions may waste. This is the goal of the isolation benchmark on a CPU.
MAX_WASTED_SHARE = 0.03
EXPECTED_WASTE = 0.3  # share of a step's time that is wasted if a request that arrives evicts bulk from the step


@dataclass(frozen=True, slots=True)
class StepLimit:
    """The longest predicted time that a step may have after the work of one tier was added to it.

    `base_s` is the limit that is known before the step is formed. The methods compute the limits that depend on the
    step itself. Their argument `planned_s` is the predicted time of the step with the work planned so far.
    """

    base_s: float = NEVER_S
    extra_share: float = 0.0  # share of `planned_s` that the tier may add even if the step then exceeds `base_s`
    hard_limit_s: float = (
        NEVER_S  # limit of the step with that extra; in a longer step, interactive tokens would be late
    )

    def total_s(self, planned_s: float) -> float:
        """Return the limit of the step: `base_s`, or the limit with the extra share if that is longer."""
        return max(self.base_s, self.extra_only_s(planned_s))

    def extra_only_s(self, planned_s: float) -> float:
        """Return the limit for a tier that may add only its extra share."""
        return min((1 + self.extra_share) * planned_s, self.hard_limit_s)

    def prefills_s(self, planned_s: float, guaranteed_s: float) -> float:
        """Return the limit for prefills of the tier.

        `guaranteed_s` is the predicted time of the work in this step that serves min shares; 0 if there is none. If
        there is such work, prefills may lengthen the step by at most `guaranteed_s`. Without this rule, the step could
        become so long that this work would be only a small share of it.
        """
        limit_s = self.total_s(planned_s)
        return min(limit_s, planned_s + guaranteed_s) if guaranteed_s else limit_s


def in_time_limit_s(limit_s: float, planned_s: float) -> float:
    """Return the limit for prefills that can still be in time, if late prefills wait too.

    The rest of the time up to `limit_s` is for the late prefills.
    """
    return limit_s - LATE_SHARE * max(0.0, limit_s - planned_s) if limit_s < NEVER_S else limit_s


@dataclass(frozen=True, slots=True)
class InteractiveTraffic:
    """The SLOs of all interactive tiers and the observations of their requests, from which step limits are computed."""

    ttft_slo_s: float  # the shortest TTFT SLO
    service_s: float  # usual time from first step to first token in the fastest tier; NEVER_S: unknown
    arrivals_per_s: float  # of all interactive tiers together
    ttft_margin: float  # share by which bulk's steps are shortened
    itl_margin_of: Mapping[str, float]  # by tier: share of the time until the next token that is kept in reserve
    overhead_s: float  # time that the host needs for a step in addition to the engine's time


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of one step for each kind of tier that adds work to it.

    `guaranteed` is the limit for a bulk tier whose min share is due.
    """

    interactive: StepLimit
    bulk: StepLimit
    guaranteed: StepLimit


def step_limits(
    traffic: InteractiveTraffic | None,
    step_eviction: StepEviction,
    decoding: Sequence[RequestState],
    cost: StepCost,
    now: float,
) -> StepLimits:
    """Return the limits of the next step.

    `traffic` is None if no tier is interactive. `decoding` are the interactive sequences that have their first token.
    """
    guaranteed = StepLimit(AMORTISE * cost.step_s)
    if traffic is None:
        return StepLimits(StepLimit(), StepLimit(), guaranteed)
    if decoding:
        interactive_s = _decodes_limit_s(decoding, traffic, now)
        bulk_s = _bulk_beside_s(decoding, traffic, step_eviction, cost)
        bulk_s = max(min(interactive_s, bulk_s), cost.step_s)
    else:
        interactive_s = FIRST_STEP_SHARE * traffic.ttft_slo_s
        bulk_s = bulk_alone_s(traffic, step_eviction, cost)
    return StepLimits(
        StepLimit(interactive_s, extra_share=PREFILL_EXTRA_SHARE),
        StepLimit(bulk_s, extra_share=MAX_PREFILL_SLOWDOWN, hard_limit_s=interactive_s),
        guaranteed,
    )


def bulk_alone_s(traffic: InteractiveTraffic, step_eviction: StepEviction, cost: StepCost) -> float:
    """Return the longest time that a step may take if it holds only bulk."""
    return max(AMORTISE * cost.step_s, _max_bulk_s(traffic, step_eviction))


def _decodes_limit_s(decoding: Sequence[RequestState], traffic: InteractiveTraffic, now: float) -> float:
    """Return the longest time that the step may take so that the next tokens of `decoding` are in time."""
    margin = max(traffic.itl_margin_of[name] for name in {s.tier.name for s in decoding})
    return min(slack_s(decoding, now), itl_cap_s(decoding)) * (1 - margin) - traffic.overhead_s


def _bulk_beside_s(
    decoding: Sequence[RequestState], traffic: InteractiveTraffic, step_eviction: StepEviction, cost: StepCost
) -> float:
    """Return the longest time that a step with interactive decodes and bulk may take.

    In a longer step, the bulk would slow down the interactive tokens too much.
    """
    decodes_s = cost.step(sum(cost.decode(s.num_computed_tokens) for s in decoding))
    longest_s = min(MAX_DECODE_SLOWDOWN * decodes_s, MAX_ITL_SHARE * itl_cap_s(decoding))
    return max(decodes_s, min(decodes_s + _max_bulk_s(traffic, step_eviction), longest_s))


def _max_bulk_s(traffic: InteractiveTraffic, step_eviction: StepEviction) -> float:
    """Return the longest time that bulk may use in one step.

    If bulk used more, a request that arrives would be delayed too much, or evictions would waste more than
    `MAX_WASTED_SHARE` of bulk's time.
    """
    for_delay_s = DELAY_SHARE * traffic.service_s / MEAN_RESIDUAL[step_eviction]
    for_waste_s = NEVER_S
    if step_eviction is not StepEviction.NOTHING and traffic.arrivals_per_s > 0:
        for_waste_s = MAX_WASTED_SHARE / (EXPECTED_WASTE * traffic.arrivals_per_s)
    return min(LONGEST_STEP_S, for_delay_s, for_waste_s) * (1 - traffic.ttft_margin)
