"""Batching delay (wait-or-full): whether the newcomers of a tier wait for others before their batch begins. Pure.

A newcomer is a request that has not run yet. A flood of them fills the batch, and light traffic starts at once. Where
steps cost the same however full they are, max-wait is the main knob.
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
    """The batch that a tier's newcomers would join."""

    slots: int  # free, of the tier
    fixed_s: float  # fixed cost of the step
    has_work: bool  # other sequences run in the step


def is_waiting(tier: Tier, table: RequestTable, budget: TierBudget, batch: BatchSoFar, now: float) -> bool:
    """Return whether the newcomers wait: until the batch is full, or the oldest has waited for max-wait. Beside other
    work only bulk waits; on an idle engine all tiers do, if other requests arrive soon enough to be worth it."""
    if not budget.max_wait_s or not 0 < table.num_waiting(tier.name) < batch.slots:
        return False
    if batch.has_work:
        if tier.is_interactive:
            return False
    elif table.any_resident or not is_worth_it(budget.arrival_gap_s, batch.fixed_s):
        return False
    return now < _max_wait_ends_s(table, tier.name, budget)


def idle_until_s(tiers: Sequence[Tier], table: RequestTable, budgets: Budgets, now: float) -> float:
    """Return when the loop must look again after an empty plan: when the first max-wait ends. Requests past max-wait
    are blocked on something else, whose event wakes the loop."""
    ends = (_max_wait_ends_s(table, t.name, budgets.tiers[t.name]) for t in tiers if table.num_waiting(t.name))
    return min((end_s for end_s in ends if end_s > now), default=NEVER_S)


def _max_wait_ends_s(table: RequestTable, tier: str, budget: TierBudget) -> float:
    return min(state.claimed_s for state in table.waiting(tier)) + budget.max_wait_s
