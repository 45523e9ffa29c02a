"""Batching delay (wait-or-full): whether the newcomers of a tier wait for further requests before their batch starts.

A newcomer is a request that has not run yet. If there are enough newcomers to fill the batch, they start at once. If
traffic is light and the engine is idle, they also start at once, because waiting does not pay. On an engine whose step
time does not depend on the batch size, max-wait is the main knob. All functions are pure.
"""

from collections.abc import Sequence

from engine.step_time.kind import SHORTEST_S
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import Budgets, TierBudget
from scheduler.control.max_wait import is_worth_it
from scheduler.holdings.request_table import RequestTable


def is_waiting(
    tier: Tier, table: RequestTable, budget: TierBudget, slots: int, fixed_s: float, has_work: bool, now: float
) -> bool:
    """Return whether the newcomers of `tier` must wait at `now`.

    `slots` is the number of free slots of the tier, and `fixed_s` the fixed cost of a step. `has_work` says whether
    other sequences run in the step.

    They wait only on an idle engine, if requests arrive often enough that waiting pays: until there are enough of them
    to fill the batch, or until the oldest one has waited for max-wait. Whoever joins a step that has other work spares
    its fixed cost already.
    """
    if not budget.max_wait_s or not 0 < table.num_waiting(tier.name) < slots:
        return False
    if has_work or table.any_resident or not is_worth_it(budget.arrival_gap_s, fixed_s):
        return False
    return now + SHORTEST_S < _max_wait_ends_s(table, tier.name, budget)


def idle_until_s(tiers: Sequence[Tier], table: RequestTable, budgets: Budgets, now: float) -> float:
    """Return the time at which the step loop must plan again after an empty plan; inf if no max-wait is running.

    This is the time at which the first max-wait ends. A request whose max-wait has ended waits for another event, and
    that event wakes the loop.
    """
    ends = (_max_wait_ends_s(table, t.name, budgets.tiers[t.name]) for t in tiers if table.num_waiting(t.name))
    return min((end_s for end_s in ends if end_s > now + SHORTEST_S), default=NEVER_S)


def _max_wait_ends_s(table: RequestTable, tier: str, budget: TierBudget) -> float:
    return min(state.claimed_s for state in table.waiting(tier)) + budget.max_wait_s
