"""Batching delay (wait-or-full): whether the newcomers of a tier wait for others before their batch begins.

Pure. A flood fills the batch, and light traffic is flushed at once. Where steps cost the same however full they are,
this is the main knob.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import Budgets, TierBudget
from scheduler.control.max_wait import is_worth_it
from scheduler.planning.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class BatchSoFar:
    """What a tier's newcomers would join: its free slots, the fixed cost of the step, and whether others run in it."""

    slots: int
    fixed_s: float
    has_work: bool


def is_waiting(tier: Tier, table: RequestTable, budget: TierBudget, batch: BatchSoFar, now: float) -> bool:
    """Newcomers wait for company until the batch is full or the oldest has waited for max-wait. Beside other work those
    without a promise do; on an idle engine all do, as long as company comes soon enough to be worth it."""
    if not budget.max_wait_s or not 0 < table.num_waiting(tier.name) < batch.slots:
        return False
    if batch.has_work:
        if tier.is_interactive:
            return False
    elif table.any_resident or not is_worth_it(budget.gap_s, batch.fixed_s):
        return False
    return now < _patience_ends_s(table, tier.name, budget)


def idle_until_s(tiers: Sequence[Tier], table: RequestTable, budgets: Budgets, now: float) -> float:
    """Where a plan is empty: when the first of those that may be waiting for company have waited for long enough. Who
    has no patience left waits for something else, which says itself when it is there."""
    ends = (_patience_ends_s(table, t.name, budgets.tiers[t.name]) for t in tiers if table.num_waiting(t.name))
    return min((end_s for end_s in ends if end_s > now), default=NEVER_S)


def _patience_ends_s(table: RequestTable, tier: str, budget: TierBudget) -> float:
    return min(state.claimed_s for state in table.waiting(tier)) + budget.max_wait_s
