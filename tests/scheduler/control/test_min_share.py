"""Min shares: a tier gets its min share, and no long burst after a flood."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.control.min_share import MinShares
from tests.scheduler.builders import make_tiers

STEP_S = 0.03


def make_counter(min_share: float = 0.05) -> MinShares:
    return MinShares(make_tiers(bulk={"floor": min_share}).by_priority)


@given(st.lists(st.floats(0.001, 0.2), min_size=20, max_size=100), st.floats(0.01, 0.4))
def test_a_tier_that_is_served_whenever_time_is_due_gets_its_share(steps: list[float], min_share: float) -> None:
    counter, used_s = make_counter(min_share), 0.0
    for elapsed_s in steps:
        bulk_s = elapsed_s if counter.is_due("bulk", STEP_S) else 0.0
        counter.add_step(elapsed_s, {"bulk": bulk_s}, ["bulk"])
        used_s += bulk_s
        assert counter.due_s("bulk") >= 0
    assert used_s >= min_share * sum(steps) - STEP_S - min_share * max(steps)


def test_a_long_flood_leaves_no_more_due_than_a_short_one() -> None:
    due_s = []
    for flood_s in (10.0, 100.0, 10_000.0):
        counter = make_counter()
        counter.add_step(flood_s, {}, ["bulk"])
        due_s.append(counter.due_s("bulk"))
    assert due_s[0] < due_s[1] == due_s[2] < 5


def test_in_an_overload_urgent_work_raises_the_share_up_to_a_limit() -> None:
    """Else it would take from tiers that keep their SLOs."""
    counter = make_counter(0.02)
    counter.set_urgency("bulk", 1.0)
    assert counter.share("bulk") == 0.02
    counter.is_overload = True
    shares = []
    for urgency in (0.0, 0.5, 1.0, 7.0):
        counter.set_urgency("bulk", urgency)
        shares.append(counter.share("bulk"))
    assert shares[0] == 0.02 and shares[0] < shares[1] < shares[2] == shares[3] < 1


def test_urgency_gives_a_share_to_a_tier_without_a_min_share() -> None:
    counter = make_counter(0.0)
    counter.is_overload = True
    counter.add_step(10.0, {}, ["bulk"])
    assert not counter.is_due("bulk", STEP_S)
    counter.set_urgency("bulk", 1.0)
    counter.add_step(0.1, {}, ["bulk"])
    assert counter.is_due("bulk", STEP_S)


def test_nothing_due_is_worth_no_step_even_if_steps_cost_nothing() -> None:
    """Noise can make the predicted fixed cost of a step 0."""
    counter = make_counter()
    assert not counter.is_due("bulk", 0.0)
    counter.add_step(0.1, {}, ["bulk"])
    assert counter.is_due("bulk", 0.0)
