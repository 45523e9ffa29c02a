"""The slowdown that bulk causes: when slots without bulk come, what counts in them, and what the interval holds."""

import random

import pytest

from engine.step_time.cost import StepCost
from scheduler.control.slowdown import MAX_SLOT_S, SHARE, SLOT_S, Comparison, SlowdownMeter
from scheduler.control.windows import MIN_SAMPLES
from scheduler.request_state import RequestState
from tests.scheduler.builders import KnownStepTime, make_state

COST = StepCost(step_s=0.08, decode_s=0.02)
BULK_S = 0.05


def make_meter(seed: int = 1) -> SlowdownMeter:
    return SlowdownMeter(random.Random(seed).random, KnownStepTime(COST))


def arrived(at_s: float, name: str = "rt") -> RequestState:
    state = make_state(name)
    state.arrived_s = at_s
    return state


def next_slot_s(meter: SlowdownMeter, now: float) -> float:
    """Return when bulk is withheld next, to a hundredth of a second."""
    while not meter.withholds(True, [], now):
        now += 0.01
    return now


def test_slots_take_their_share_of_the_time() -> None:
    meter, withheld = make_meter(), 0
    num_looks = 300_000
    for look in range(num_looks):
        withheld += meter.withholds(True, [], 0.05 * look)
    assert withheld / num_looks == pytest.approx(SHARE, rel=0.1)


def test_bulk_always_runs_when_it_is_off() -> None:
    meter = make_meter()
    assert not any(meter.withholds(False, [], 0.1 * look) for look in range(10_000))


def test_a_slot_lasts_until_its_requests_have_their_first_tokens() -> None:
    meter, late = make_meter(), arrived(0.0)
    begins_s = next_slot_s(meter, 0.0)
    late.arrived_s = begins_s + 0.1
    meter.note_arrival(late, beside_bulk=False)
    assert late.in_slot
    assert meter.withholds(True, [late], begins_s + SLOT_S + 0.1)
    assert not meter.withholds(True, [late], begins_s + MAX_SLOT_S + 0.1)


def test_a_request_that_arrives_while_a_step_with_bulk_still_runs_does_not_count() -> None:
    meter = make_meter()
    begins_s = next_slot_s(meter, 0.0)
    state = arrived(begins_s + 0.05)
    meter.note_arrival(state, beside_bulk=True)
    assert state.in_slot is None
    meter.add_step([], [], step_s=begins_s + 0.1, now=begins_s + 0.1, has_bulk=True)
    meter.note_arrival(state, beside_bulk=False)
    assert state.in_slot is None, "it arrived during that step"
    after = arrived(begins_s + 0.2)
    meter.note_arrival(after, beside_bulk=False)
    assert after.in_slot


def test_a_request_that_arrives_in_a_slot_and_is_claimed_after_it_does_not_count() -> None:
    meter = make_meter()
    begins_s = next_slot_s(meter, 0.0)
    assert not meter.withholds(True, [], begins_s + SLOT_S + 0.1)
    state = arrived(begins_s + 0.2)
    meter.note_arrival(state, beside_bulk=True)
    assert state.in_slot is None


@pytest.mark.parametrize("num_present", [1, 4])
def test_answers_are_compared_step_by_step_without_the_work_of_others(num_present: int) -> None:
    meter, now = make_meter(), 0.0
    states = [arrived(0.0, f"rt{i}") for i in range(num_present)]
    while (found := meter.readings().get(("realtime", "e2e"))) is None:
        has_bulk = not meter.withholds(True, states, now)
        step_s = COST.step(num_present * COST.decode_s) + BULK_S * has_bulk
        now += step_s
        meter.add_step([(state, 1, 100) for state in states], states, step_s, now, has_bulk=has_bulk)
    assert found.slots == MIN_SAMPLES
    assert found.value == pytest.approx((COST.step(COST.decode_s) + BULK_S) / COST.step(COST.decode_s))


def test_requests_that_yield_and_bulk_are_left_out() -> None:
    meter, now = make_meter(), 0.0
    state, flood, bulk = arrived(0.0), arrived(0.0, "flood"), make_state("b", "bulk")
    flood.yields = True
    meter.withholds(True, [], now)
    meter.note_arrival(bulk, beside_bulk=True)
    assert bulk.in_slot is None
    while (found := meter.readings().get(("realtime", "e2e"))) is None:
        has_bulk = not meter.withholds(True, [state, flood], now)
        step_s = COST.step(2 * COST.decode_s) + BULK_S * has_bulk
        now += step_s
        meter.add_step([(state, 1, 9), (flood, 1, 9)], [state, flood], step_s, now, has_bulk=has_bulk)
    assert found.value == pytest.approx((COST.step(COST.decode_s) + BULK_S) / COST.step(COST.decode_s))


def test_first_tokens_are_compared_by_their_time_of_arrival() -> None:
    meter, now = make_meter(), 0.0
    while (found := meter.readings().get(("realtime", "ttft"))) is None:
        is_slot = meter.withholds(True, [], now)
        state = arrived(now)
        meter.note_arrival(state, beside_bulk=not is_slot)
        meter.note_first_token(state, now + (0.1 if is_slot else 0.12))
        now += 0.2
    assert found.value == pytest.approx(1.2)


def test_the_interval_holds_the_truth_in_about_95_of_100_cases() -> None:
    truth, held = 1.2, 0
    for seed in range(300):
        draw = random.Random(seed)
        comparison = Comparison()
        for _ in range(60):
            load = draw.expovariate(1.0)  # what a slot and the time before it have in common
            for in_slot, factor, num in ((False, truth, 12), (True, 1.0, 2)):
                for _ in range(num):
                    work = load * draw.uniform(0.5, 1.5)
                    comparison.add(factor * work * draw.lognormvariate(0.0, 0.3), work, in_slot=in_slot)
            comparison.close_round()
        assert comparison.slowdown is not None
        held += comparison.slowdown.low <= truth <= comparison.slowdown.high
    assert 0.91 <= held / 300 <= 0.98
