"""Laxity: the time until a deadline minus the work left; urgency follows from it."""

import pytest

from engine.step_time.cost import StepCost
from scheduler.deadlines import laxity_s, urgency_of, work_s
from scheduler.request_state import RequestState
from tests.scheduler.builders import EPOCH_MS, make_state, make_tiers

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0001, decode_s=0.002)
ATTENDING = StepCost(step_s=0.0, prefill_token_s=0.0, attend_s=0.001, context_token_s=0.0, decode_s=0.0)


@pytest.mark.parametrize(
    ("prefill", "output", "cost", "context", "seconds"),
    [
        (100, 1, COST, 0, 0.01 + 0.1),
        (100, 11, COST, 0, 0.01 + 0.1 + 10 * (0.01 + 0.002 + 0.0001 * 105)),
        (0, 10, COST, 200, 10 * (0.01 + 0.002 + 0.0001 * 205)),
        (0, 0, COST, 200, 0),
        (10, 1, ATTENDING, 100, 0.001 * 10 * 105),
    ],
)
def test_work_is_one_prefill_and_a_step_for_every_further_token(
    prefill: int, output: int, cost: StepCost, context: int, seconds: float
) -> None:
    assert work_s(prefill, output, cost, context) == pytest.approx(seconds)


def bulk(due_s: float, horizon_s: float, urgent_ms: int = 0) -> RequestState:
    """Return a request with 0.11 s of work."""
    tiers = make_tiers(bulk={"urgent_ms": int(1000 * horizon_s)})
    due_ms = EPOCH_MS + int(1000 * due_s)
    return make_state("b", "bulk", tiers=tiers, prompt=100, max_tokens=1, deadline_ms=due_ms, urgent_ms=urgent_ms)


def test_laxity_is_how_long_a_request_may_still_wait() -> None:
    assert laxity_s(bulk(1.0, 5.0), COST, 0.0) == pytest.approx(0.89)
    assert laxity_s(bulk(1.0, 5.0), COST, 0.95) == pytest.approx(-0.06)
    assert laxity_s(bulk(1.0, 5.0, urgent_ms=500), COST, 0.0) == pytest.approx(1.0), "the job has left time for it"


@pytest.mark.parametrize(
    ("laxity", "horizon_s", "urgency"),
    [
        (5.0, 5.0, 0.0),
        (4.0, 5.0, 0.2),
        (-4.9, 5.0, 1.0),  # costs are the 95th percentile: a little late may be on time
        (-5.0, 5.0, 0.0),
        (0.0, 0.0, 0.0),
    ],
)
def test_urgent_inside_the_horizon_neither_long_before_nor_hopelessly_late(
    laxity: float, horizon_s: float, urgency: float
) -> None:
    assert urgency_of(bulk(10.11, horizon_s), COST, 10.0 - laxity) == pytest.approx(urgency)
