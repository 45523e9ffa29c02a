"""Who yields in front of a server: what keys are charged for, and for how long one that is gone counts as there."""

from engine.step_time.cost import StepCost
from engine.step_time.model import StepTimeModel
from scheduler.drivers.streams.precedence import QUIET_S, Precedence
from scheduler.drivers.streams.step_times import SeenStep
from scheduler.request import OWN_REQUESTS
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_decode, make_table, make_tiers

COST = StepCost(step_s=0.02, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.0005)
TIERS = make_tiers()


def flood(owner: str) -> list[RequestState]:
    return [make_decode(f"{owner}{i}", "realtime", owner=owner) for i in range(OWN_REQUESTS + 1)]


def precedence_of(*states: RequestState) -> Precedence:
    precedence = Precedence(make_table(TIERS, states), StepTimeModel())
    for state in states:
        precedence.begin(state)
    return precedence


def note(precedence: Precedence, state: RequestState, seconds: float) -> None:
    seen = SeenStep(seconds, seconds, {"realtime": 1}, [(state, 1, 32)], 1, {"realtime": seconds})
    precedence.note_step(seen, seconds, COST)


def test_a_key_is_charged_for_the_time_that_its_steps_took() -> None:
    a, b = flood("a"), flood("b")
    precedence = precedence_of(*a, *b)
    note(precedence, a[0], 0.3)
    note(precedence, b[0], 0.1)
    precedence.update(TIERS.by_priority, 0.0)
    assert [state.id for state in (*a, *b) if state.yields] == [a[-1].id]
    note(precedence, b[0], 0.4)
    precedence.update(TIERS.by_priority, 0.0)
    assert [state.id for state in (*a, *b) if state.yields] == [b[-1].id]


def test_a_key_counts_as_there_for_a_while_after_its_newest_request() -> None:
    a, b = flood("a"), make_decode("b", "realtime", owner="b")
    precedence = precedence_of(*a)
    precedence.begin(b)  # it ends before the next decision, so the table has no request of this key
    note(precedence, a[0], 0.3)
    yields = []
    for now in (0.0, QUIET_S - 1, QUIET_S + 1):
        precedence.update(TIERS.by_priority, now)
        yields.append(a[-1].yields)
    assert yields == [True, True, False]
