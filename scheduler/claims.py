"""How many requests a worker takes from each tier's queue, highest tier first.

Pure. The engine's own queue stays shallow and the store's deep: policy can only reorder what still waits there, and
other workers may be free sooner.
"""

from collections.abc import Mapping, Sequence

from scheduler.budgets import Budgets, TierBudget
from scheduler.config import Tier
from scheduler.roster import Roster

PREFETCH = 4  # claimed beyond the free slots, so that a slot freed in a step is filled in the next
KNOWN_WAITING = 2  # of a paused tier that looks at deadlines: its most urgent ones must be known here to be told


def claim_limits(
    tiers: Sequence[Tier],
    roster: Roster,
    budgets: Budgets,
    max_step_tokens: int,
    ending: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Without the tiers of which nothing is wanted. `ending`: by tier, the sequences that end with the step that runs,
    for certain: whoever takes their slots must be here by then."""
    limits = {}
    for tier in tiers:
        num_ending = ending.get(tier.name, 0) if ending else 0
        room = _room(tier, roster, budgets.tiers[tier.name], max_step_tokens, num_ending)
        if room > 0:
            limits[tier.name] = room
    return limits


def _room(tier: Tier, roster: Roster, budget: TierBudget, max_step_tokens: int, num_ending: int) -> int:
    free = budget.max_num_seqs - roster.count(tier.name) + num_ending
    num_waiting = roster.num_waiting(tier.name)
    if tier.is_interactive:
        if num_waiting <= PREFETCH + num_ending:
            return free + PREFETCH
        return min(free + PREFETCH, PREFETCH) if _waiting_tokens(roster, tier.name) < max_step_tokens else 0
    if budget.paused:
        return min(free, KNOWN_WAITING - num_waiting) if tier.can_press else 0
    return free


def _waiting_tokens(roster: Roster, tier: str) -> int:
    return sum(state.num_uncomputed for state in roster.waiting(tier))
