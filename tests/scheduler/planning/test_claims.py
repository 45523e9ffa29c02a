"""How many a worker takes from each queue."""

import pytest

from engine.step_time.model import StepCost
from scheduler.config import TierSet
from scheduler.control.budget import Budgets, TierBudget
from scheduler.planning.claims import KNOWN_WAITING, PREFETCH, claim_limits
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_decode, make_state, make_table, make_tiers

TIERS = make_tiers()


def limits(states: list[RequestState], tiers: TierSet = TIERS, **budgets: TierBudget) -> dict[str, int]:
    of_tier = {t.name: budgets.get(t.name, TierBudget(max_num_seqs=8)) for t in tiers.by_priority}
    table = make_table(tiers, states)
    return claim_limits(tiers.by_priority, table, Budgets(of_tier, StepCost()), max_step_tokens=100)


def test_slots_are_filled_and_a_few_interactive_more_so_that_a_freed_slot_is_filled_at_once() -> None:
    states = [make_decode("a", "realtime"), make_decode("b", "bulk"), make_state("c", "bulk")]
    assert limits(states) == {"realtime": 7 + PREFETCH, "bulk": 6, "batch": 8}


@pytest.mark.trap(10)
def test_what_no_step_could_begin_with_stays_in_the_store() -> None:
    """Trap 10: a backlog hidden in the engine cannot be reordered."""
    waiting = [make_state(f"w{i}", prompt=30) for i in range(PREFETCH + 1)]
    assert "realtime" not in limits(waiting)
    assert limits([make_state(f"w{i}", prompt=2) for i in range(PREFETCH + 1)])["realtime"] == PREFETCH


def test_nothing_is_taken_of_a_paused_tier() -> None:
    paused = TierBudget(max_num_seqs=8, decodes_only=True)
    assert limits([], bulk=paused) == {"realtime": 8 + PREFETCH, "batch": 8}


def test_of_a_paused_tier_that_looks_at_deadlines_the_most_urgent_are_known() -> None:
    tiers = make_tiers(bulk={"urgent_ms": 1000})
    paused = TierBudget(max_num_seqs=8, decodes_only=True)
    assert limits([], tiers, bulk=paused)["bulk"] == KNOWN_WAITING
    known = [make_state(f"k{i}", "bulk", tiers=tiers) for i in range(KNOWN_WAITING)]
    assert "bulk" not in limits(known, tiers, bulk=paused)
