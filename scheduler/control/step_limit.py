"""How long a step may be predicted to take: the limits of the controller's inner loop. All times in seconds.

A step that holds interactive decodes must end before the earliest of their next tokens is due. Bulk may make a step
longer only as far as interactive requests hardly notice: those that decode in it, and those that arrive while it runs.

Pure: request states, predicted costs and observed rates in; limits out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.interface import StepEviction
from engine.step_time.model import StepCost
from scheduler.clock import NEVER_S
from scheduler.deadlines import itl_cap_s, slack_s
from scheduler.request_state import RequestState

# The limit of an interactive tier.
FIRST_STEP_SHARE = (
    0.25  # of the TTFT SLO: limit of a step of prefills only, so that an arrival during it can be in time
)
PREFILL_EXTRA_SHARE = 0.25  # of the step's time: what prefills may always add, or late decodes would starve prefills
LATE_SHARE = 0.2  # of the time left for prefills: kept for those that cannot meet their deadline any more

# The limit of a bulk tier.
AMORTISE = (
    3.0  # times the fixed cost of a step: a bulk step may always last this long; a shorter one is mostly overhead
)
MAX_ITL_SHARE = 0.5  # of the ITL SLO: limit of a step of interactive decodes with bulk in it
MAX_DECODE_SLOWDOWN = 1.5  # times what the interactive decodes take alone: limit of their step with bulk in it
MAX_PREFILL_SLOWDOWN = 0.03  # of a step that computes a first token: what bulk may add to it
LONGEST_STEP_S = 0.25  # limit of a bulk step where nothing else limits it
DELAY_SHARE = 0.07  # of the usual time from first step to first token: mean delay of an arrival by bulk
# Mean share of a running bulk step that an arrival waits for. Without mid-step eviction it is half of the step; bulk
# that can be evicted may run longer steps for the same mean delay.
MEAN_RESIDUAL = {StepEviction.NOTHING: 0.5, StepEviction.STEPS: 0.25, StepEviction.ROWS: 1 / 16}
WASTED_SHARE = 0.03  # of bulk's time: what mid-step evictions may waste; the goal measured in the isolation benchmark
EXPECTED_WASTE = 0.3  # of a step's time: what one arrival that evicts bulk from the step wastes of it


@dataclass(frozen=True, slots=True)
class StepLimit:
    """How long a step may be predicted to take once the work of one tier is in it.

    `limit_s` is known before the step is formed. The methods are the one place for what depends on the step itself:
    `planned_s` is the predicted time of the step as far as it is planned, without the work to be added.
    """

    limit_s: float = NEVER_S
    extra_share: float = 0.0  # of the time planned: the tier may add this much even beyond `limit_s` …
    hard_limit_s: float = NEVER_S  # … but not beyond this: the next tokens of interactive tiers would be late

    def total_s(self, planned_s: float) -> float:
        return max(self.limit_s, self.extra_only_s(planned_s))

    def extra_only_s(self, planned_s: float) -> float:
        """Return the limit for a tier that may add its extra share and nothing else."""
        return min((1 + self.extra_share) * planned_s, self.hard_limit_s)

    def prefills_s(self, planned_s: float, guaranteed_s: float) -> float:
        """Return the limit for prefills. In a step that serves a min share, they add at most the `guaranteed_s` that
        the guaranteed work takes (0: the step has none): else the min share would be a small share of long steps."""
        limit_s = self.total_s(planned_s)
        return min(limit_s, planned_s + guaranteed_s) if guaranteed_s else limit_s


def in_time_limit_s(limit_s: float, planned_s: float) -> float:
    """Return the limit for prefills that can be in time, where others that cannot wait for the rest of `limit_s`."""
    return limit_s - LATE_SHARE * max(0.0, limit_s - planned_s) if limit_s < NEVER_S else limit_s


def decodes_limit_s(decoding: Sequence[RequestState], now: float, margin: float, overhead_s: float) -> float:
    """Return how long a step may last for the next tokens of `decoding` to be in time. `margin`: share of the time that
    is kept in reserve; `overhead_s`: the host's time beside the step."""
    return min(slack_s(decoding, now), itl_cap_s(decoding)) * (1 - margin) - overhead_s


def prefill_only_limit_s(ttft_slo_s: float) -> float:
    """Return how long a step without decodes may last for an arrival during it to be in time still."""
    return FIRST_STEP_SHARE * ttft_slo_s


@dataclass(frozen=True, slots=True)
class InteractiveTraffic:
    """What was observed of all interactive tiers together."""

    service_s: float  # usual time from first step to first token, of the quickest tier; NEVER_S: unknown
    arrivals_per_s: float
    ttft_margin: float  # share by which bulk's steps are shortened, in [0, 1)


def bulk_limit_s(
    traffic: InteractiveTraffic,
    eviction: StepEviction,
    cost: StepCost,
    decodes_s: float = 0.0,
    itl_slo_s: float = NEVER_S,
) -> float:
    """Return how long a step may last with bulk in it. `decodes_s` is what the interactive decodes in it take by
    themselves (0: there are none), `itl_slo_s` the shortest gap allowed to any of them."""
    bulk_s = _max_bulk_s(traffic, eviction)
    if not decodes_s:
        return max(AMORTISE * cost.step_s, bulk_s)
    return max(decodes_s, min(decodes_s + bulk_s, MAX_DECODE_SLOWDOWN * decodes_s, MAX_ITL_SHARE * itl_slo_s))


def _max_bulk_s(traffic: InteractiveTraffic, eviction: StepEviction) -> float:
    max_mean_delay_s = DELAY_SHARE * traffic.service_s
    longest_s = min(
        LONGEST_STEP_S, max_mean_delay_s / MEAN_RESIDUAL[eviction], _max_step_for_waste_s(traffic, eviction)
    )
    return longest_s * (1 - traffic.ttft_margin)


def _max_step_for_waste_s(traffic: InteractiveTraffic, eviction: StepEviction) -> float:
    """Return the step length at which evictions by arrivals waste no more than `WASTED_SHARE` of bulk's time."""
    if eviction is StepEviction.NOTHING or traffic.arrivals_per_s <= 0:
        return NEVER_S
    return WASTED_SHARE / (EXPECTED_WASTE * traffic.arrivals_per_s)
