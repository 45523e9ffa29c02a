"""The controller's report on one tier: numbers for metrics and heartbeats, and plain data for GET /admin/sla."""

from dataclasses import dataclass
from typing import Any

from scheduler.control.knobs import TierKnobs
from scheduler.control.min_share import MinShares
from scheduler.control.tier_stats import TierStats


@dataclass(frozen=True, slots=True)
class TierOutputs:
    """The knobs, the margin and the observed latencies of one tier.

    The p99 values and `attainment` cover the last 30 seconds. `attainment` is the share of the ended requests that met
    all targets. None means that there is too little data.
    """

    batch_size: int
    max_wait_s: float
    margin: float
    ttft_p99_s: float | None
    itl_p99_s: float | None
    attainment: float | None
    batch_tokens: int = 0
    arrivals_per_s: float = 0.0
    is_overloaded: bool = False  # first tokens would come much too late, so that the tier is served in order


def explain_tier(tier: str, knobs: TierKnobs, stats: TierStats, min_shares: MinShares, now: float) -> dict[str, Any]:
    """Return the knobs of a tier and the signals that move them, as plain data.

    The keys are part of the public API. Times are in seconds.
    """
    return {
        "knobs": {knob.name: knob.explain() for knob in knobs},
        "step_sequences": stats.step_sequences,
        "signals": {
            "ttft_p99_s": stats.p99_s("ttft", now),
            "itl_p99_s": stats.p99_s("itl", now),
            "miss_share": stats.worst_miss_share(now),
            "attainment": stats.attainment(now),
            "arrivals_per_s": round(stats.rate_per_s, 6),
            "first_token_service_s": stats.service_s,
            "floor_share": min_shares.share(tier),
            "floor_debt_s": min_shares.due_s(tier),
        },
    }
