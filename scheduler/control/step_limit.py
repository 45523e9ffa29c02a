"""How long a step may be predicted to take: the limits of the controller's inner loop. All times in seconds.

A step that holds interactive decodes must end before the earliest of their next tokens is due. Bulk may make a step
longer only as far as interactive requests hardly notice: those that decode in it, and those that arrive while it runs.

Pure: request states, predicted costs and observed rates in; limits out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.interface import StepEviction
from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.deadlines import itl_cap_s, slack_s
from scheduler.request_state import RequestState

# For interactive tiers.
FIRST_STEP_SHARE = 0.25  # of the TTFT SLO: limit of a step without decodes, so that an arrival during it can be in time
PREFILL_EXTRA_SHARE = 0.25  # of the step: what prefills may always add to it, or late decodes would starve prefills
LATE_SHARE = 0.2  # of the time left for prefills: kept for those that cannot meet their deadline any more

# For bulk tiers.
AMORTISE = (
    3.0  # times the fixed cost of a step: a bulk step may always last this long; a shorter one is mostly overhead
)
MAX_ITL_SHARE = 0.5  # of the ITL SLO: limit of a step of interactive decodes with bulk in it
MAX_DECODE_SLOWDOWN = 1.5  # times what the interactive decodes take alone: limit of their step with bulk in it
MAX_PREFILL_SLOWDOWN = 0.03  # of a step that computes a first token: what bulk may add to it
LONGEST_STEP_S = 0.25  # limit of a bulk step where nothing else limits it
DELAY_SHARE = 0.07  # of the usual time from first step to first token: the mean delay of an arrival that bulk may cause
# Mean share of a running bulk step that an arrival waits for. Without mid-step eviction it is half of the step; bulk
# that can be evicted may run longer steps for the same mean delay.
MEAN_RESIDUAL = {StepEviction.NOTHING: 0.5, StepEviction.STEPS: 0.25, StepEviction.ROWS: 1 / 16}
WASTED_SHARE = 0.03  # of bulk's time: what mid-step evictions may waste, the goal of the co-serving benchmark on a CPU
EXPECTED_WASTE = 0.3  # of a step's time: what one arrival that evicts bulk from the step wastes


@dataclass(frozen=True, slots=True)
class StepLimit:
    """How long a step may be predicted to take once the work of one tier is in it.

    `base_s` is known before the step is formed. The methods are the one place for what depends on the step itself:
    `planned_s` is the predicted time of the step as far as it is planned, without the work to be added.
    """

    base_s: float = NEVER_S
    extra_share: float = 0.0  # of the time planned: the tier may add this much even beyond `base_s` …
    hard_limit_s: float = NEVER_S  # … but not beyond this: the next tokens of interactive tiers would be late

    def total_s(self, planned_s: float) -> float:
        return max(self.base_s, self.extra_only_s(planned_s))

    def extra_only_s(self, planned_s: float) -> float:
        """Return the limit for a tier that may add its extra share and nothing else."""
        return min((1 + self.extra_share) * planned_s, self.hard_limit_s)

    def prefills_s(self, planned_s: float, guaranteed_s: float) -> float:
        """Return the limit for prefills. In a step that serves a min share, they add at most the `guaranteed_s` that
        the guaranteed work takes (0: the step has none): else the min share would be a small share of long steps."""
        limit_s = self.total_s(planned_s)
        return min(limit_s, planned_s + guaranteed_s) if guaranteed_s else limit_s


def in_time_limit_s(limit_s: float, planned_s: float) -> float:
    """Return the limit for prefills that can be in time; late ones that wait too get the rest up to `limit_s`."""
    return limit_s - LATE_SHARE * max(0.0, limit_s - planned_s) if limit_s < NEVER_S else limit_s


@dataclass(frozen=True, slots=True)
class InteractiveTraffic:
    """What step limits depend on: the SLOs of all interactive tiers, and what was observed of them."""

    ttft_slo_s: float  # the shortest
    service_s: float  # usual time from first step to first token, of the quickest tier; NEVER_S: unknown
    arrivals_per_s: float
    ttft_margin: float  # share by which bulk's steps are shortened
    itl_margin_of: Mapping[str, float]  # by tier: share of the time until the next token that is kept in reserve
    overhead_s: float  # the host's time beside a step


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of one step, by the kind of tier that adds work to it. `guaranteed` is for a bulk tier whose min share
    is due."""

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
    """Return the limits of the next step. `traffic` is None where no tier is interactive; `decoding` are the
    interactive sequences past their first token."""
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
    """Return how long a step of bulk alone may last."""
    return max(AMORTISE * cost.step_s, _max_bulk_s(traffic, step_eviction))


def _decodes_limit_s(decoding: Sequence[RequestState], traffic: InteractiveTraffic, now: float) -> float:
    """Return how long the step may last for all next tokens to be in time."""
    margin = max(traffic.itl_margin_of[name] for name in {s.tier.name for s in decoding})
    return min(slack_s(decoding, now), itl_cap_s(decoding)) * (1 - margin) - traffic.overhead_s


def _bulk_beside_s(
    decoding: Sequence[RequestState], traffic: InteractiveTraffic, step_eviction: StepEviction, cost: StepCost
) -> float:
    """Return how long a step of interactive decodes may last with bulk in it, for them to keep their pace."""
    decodes_s = cost.step(sum(cost.decode(s.num_computed_tokens) for s in decoding))
    longest_s = min(MAX_DECODE_SLOWDOWN * decodes_s, MAX_ITL_SHARE * itl_cap_s(decoding))
    return max(decodes_s, min(decodes_s + _max_bulk_s(traffic, step_eviction), longest_s))


def _max_bulk_s(traffic: InteractiveTraffic, step_eviction: StepEviction) -> float:
    """Return how long the engine may be busy with bulk before an arrival is delayed too much, or evictions waste more
    than `WASTED_SHARE` of bulk's time."""
    for_delay_s = DELAY_SHARE * traffic.service_s / MEAN_RESIDUAL[step_eviction]
    for_waste_s = NEVER_S
    if step_eviction is not StepEviction.NOTHING and traffic.arrivals_per_s > 0:
        for_waste_s = WASTED_SHARE / (EXPECTED_WASTE * traffic.arrivals_per_s)
    return min(LONGEST_STEP_S, for_delay_s, for_waste_s) * (1 - traffic.ttft_margin)
