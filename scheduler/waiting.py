"""Wait-or-full: is it worth waiting for company before a batch begins?

Pure. A request that joins spares the engine the fixed cost of a step of its own; those that wait for it lose the time
that it takes to come, 1/λ on average. So it is worth it where several come within that fixed cost: a flood fills the
batch, and quiet traffic is flushed at once. Where steps cost the same however full they are, this is the main knob.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.budgets import Budgets, TierBudget
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.roster import Roster

ARRIVALS_WORTH_IT = 4  # within the fixed cost of a step
SLACK_SHARE = 0.5  # of a first token's promise that may be spent on waiting for company


def is_worth_it(gap_s: float, fixed_s: float) -> bool:
    """With `gap_s` from one arrival to the next on average, and steps that cost `fixed_s` however little is in them."""
    return ARRIVALS_WORTH_IT * gap_s <= fixed_s


@dataclass(frozen=True, slots=True)
class BatchSoFar:
    """What a tier's newcomers would join: its free slots, the fixed cost of the step, and whether others run in it."""

    slots: int
    fixed_s: float
    has_work: bool


def is_waiting(tier: Tier, roster: Roster, budget: TierBudget, batch: BatchSoFar, now: float) -> bool:
    """Newcomers wait for company until the batch is full or the oldest has waited for max-wait. Beside other work those
    without a promise do; on an idle engine all do, as long as company comes soon enough to be worth it."""
    if not budget.max_wait_s or not 0 < roster.num_waiting(tier.name) < batch.slots:
        return False
    if batch.has_work:
        if tier.is_interactive:
            return False
    elif roster.any_resident or not is_worth_it(budget.gap_s, batch.fixed_s):
        return False
    return now < _patience_ends_s(roster, tier.name, budget)


def idle_until_s(tiers: Sequence[Tier], roster: Roster, budgets: Budgets, now: float) -> float:
    """Where a plan is empty: when the first of those that may be waiting for company have waited for long enough. Who
    has no patience left waits for something else, which says itself when it is there."""
    ends = (_patience_ends_s(roster, t.name, budgets.tiers[t.name]) for t in tiers if roster.num_waiting(t.name))
    return min((end_s for end_s in ends if end_s > now), default=NEVER_S)


def _patience_ends_s(roster: Roster, tier: str, budget: TierBudget) -> float:
    return min(state.claimed_s for state in roster.waiting(tier)) + budget.max_wait_s


def longest_wait_ms(ttft_p99_ms: float | None, step_s: float, min_ms: float, max_ms: float) -> float:
    """The longest wait inside [min_ms, max_ms] that leaves the promise its share and the step its time."""
    if ttft_p99_ms is None:
        return max_ms
    spare_ms = SLACK_SHARE * max(0.0, ttft_p99_ms - 2000 * step_s)
    return min(max_ms, max(min_ms, spare_ms))


def fill_ms(batch_size: float, rate_per_s: float, min_ms: float, max_ms: float) -> float | None:
    """How long a batch takes to fill, if that is within bounds; `min_ms` in traffic too thin for it. None: nothing is
    known of arrivals."""
    if rate_per_s <= 0:
        return None
    needed_ms = 1000 * batch_size / rate_per_s
    return needed_ms if needed_ms <= max_ms else min_ms
