"""How many requests a worker takes from each queue."""

import pytest

from engine.step_time.cost import StepCost
from scheduler.config import TierSet
from scheduler.control.budget import Budgets, TierBudget
from scheduler.holdings.claims import PREFETCH, claim_limits, due_limits, early_limits
from scheduler.request_state import RequestState
from tests.scheduler.builders import EPOCH_MS, make_decode, make_state, make_table, make_tiers

TIERS = make_tiers()


def limits(states: list[RequestState], tiers: TierSet = TIERS, **budgets: TierBudget) -> dict[str, int]:
    of_tier = {t.name: budgets.get(t.name, TierBudget(max_num_seqs=8)) for t in tiers.by_priority}
    table = make_table(tiers, states)
    return claim_limits(tiers.by_priority, table, Budgets(of_tier, StepCost(), StepCost()))


def test_free_slots_are_claimed_for_and_a_few_more_for_interactive_tiers() -> None:
    """A slot freed in a step is then filled in the next one."""
    claims = limits([make_decode("a", "realtime"), make_decode("b", "bulk"), make_state("c", "bulk")])
    assert (claims["bulk"], claims["batch"]) == (6, 8)
    assert 7 < claims["realtime"] < 16


@pytest.mark.trap(10)
def test_requests_without_a_slot_stay_in_the_store() -> None:
    """Trap 10: a backlog hidden in the engine cannot be reordered."""
    assert limits([make_state(f"w{i}") for i in range(12)])["realtime"] == 0
    assert 0 < limits([make_state(f"w{i}") for i in range(6)])["realtime"] < 8


def test_long_prompts_that_wait_stop_no_claims() -> None:
    """Requests that come later may be short, and due before those prompts are computed."""
    assert limits([make_state(f"w{i}", prompt=6000) for i in range(8)])["realtime"] > 0


def test_without_a_free_slot_a_few_interactive_requests_are_claimed() -> None:
    """The worker can notice that a request is late only after it has claimed the request."""
    full = [make_decode(f"d{i}", "realtime") for i in range(30)]
    assert 0 < limits(full)["realtime"] < 8
    assert limits([*full, *(make_state(f"w{i}") for i in range(8))])["realtime"] == 0


def test_who_is_due_is_claimed_without_a_free_slot() -> None:
    """A request of a key that has few has its deadline as its score; a flood's requests have later ones."""
    wall_ms = EPOCH_MS
    flood = [make_state(f"w{i}", order_ms=wall_ms + 100_000) for i in range(12)]

    def due(*states: RequestState) -> int:
        return due_limits(TIERS.by_priority, make_table(TIERS, list(states)), wall_ms)["realtime"].requests

    assert due(*flood) == PREFETCH
    limit = due_limits(TIERS.by_priority, make_table(TIERS, flood), wall_ms)["realtime"]
    assert limit.until_ms == wall_ms + 100_000 - 1, "also further requests of a key with fewer than the flood's"
    assert due(*flood, make_state("few")) == PREFETCH - 1
    assert set(due_limits(TIERS.by_priority, make_table(TIERS, []), wall_ms)) == {"realtime"}


def test_bulk_that_goes_before_what_runs_is_claimed_without_a_free_slot() -> None:
    running = [make_decode(f"d{i}", order_ms=1000 + i) for i in range(8)]
    (limit,) = (early := early_limits(TIERS.by_priority, make_table(TIERS, running))).values()
    assert (list(early), limit.requests, limit.until_ms) == (["bulk"], PREFETCH, 1006)
    waiting = [make_state("job", "bulk", order_ms=500), make_state("other", "bulk", order_ms=600)]
    waiting[0].boosted_to = 10.5
    early = early_limits(TIERS.by_priority, make_table(TIERS, [*running, *waiting]))
    assert early["bulk"].requests == PREFETCH - 1, "few are held that have not begun, beside what waits for a slot"
