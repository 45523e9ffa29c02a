"""Delay accounts: at the end of an answer, bulk has made it `max_slowdown` times as long, and hardly more."""

import random
from collections.abc import Sequence

import pytest

from engine.step_time.cost import StepCost
from engine.step_time.kind import KNOWN_STEPS
from engine.step_time.regression import WARM_STEPS
from scheduler.clock import NEVER_S
from scheduler.control.delay_account import DelayAccounts
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_state, make_tiers

TRUE = StepCost(step_s=0.01, prefill_token_s=0.0004, decode_s=0.002)
PROMPT = 100


def chat(slowdown: float | None = 1.25, name: str = "rt") -> RequestState:
    return make_state(name, prompt=PROMPT, tiers=make_tiers(realtime={"max_slowdown": slowdown}))


def accounts() -> DelayAccounts:
    """Accounts whose model has seen the engine without bulk."""
    found, draw = DelayAccounts(), random.Random(1)
    for _ in range(200):
        runs = [(chat(), draw.choice([1, 1, 1, 40]), draw.randint(1, 100)) for _ in range(draw.randint(1, 4))]
        found.add_step(runs, alone_s(runs), 0.0, is_typical=True)
    return found


def alone_s(runs: Sequence[tuple[RequestState, int, int]]) -> float:
    return TRUE.step(sum(TRUE.run(num_tokens, context) for _, num_tokens, context in runs))


@pytest.mark.parametrize("slowdown", [1.05, 1.25, 2.0])
@pytest.mark.parametrize("error", [0.5, 1.0, 2.0], ids=lambda error: f"bulk takes {error} times as long as planned")
def test_an_answer_takes_max_slowdown_times_as_long_as_alone(slowdown: float, error: float) -> None:
    found, state = accounts(), chat(slowdown)
    found.open(state, 0.0, 0.0)
    taken_s = without_s = 0.0
    for num_tokens, context in [(PROMPT, 0), *((1, PROMPT + n) for n in range(400))]:
        runs = [(state, num_tokens, context)]
        added_s = error * max(0.0, found.left_s([state]))
        without_s += alone_s(runs)
        taken_s += alone_s(runs) + added_s
        if added_s:
            found.add_shared_step(runs, alone_s(runs) + added_s, 0.0)
        else:
            found.add_step(runs, alone_s(runs), 0.0, is_typical=True)
    assert taken_s / without_s == pytest.approx(slowdown, abs=0.02)


def test_first_decodes_have_no_bulk_until_enough_of_them_are_known() -> None:
    """Else prompts alone would tell what a decode takes, since bulk is beside all others."""
    found = DelayAccounts()
    may_add = []
    for _ in range(2 * KNOWN_STEPS):
        state = chat()
        found.open(state, 0.0, 0.0)
        found.add_step([(state, PROMPT, 0)], alone_s([(state, PROMPT, 0)]), 0.0, is_typical=True)
        state.output_token_ids.append(7)
        may_add.append(found.left_s([state]) > 0)
        decode = [(state, 1, PROMPT)]
        found.add_step(decode, alone_s(decode), 0.0, is_typical=True)
        state.output_token_ids.append(7)
        assert found.left_s([state]) > 0, "further decodes may have bulk"
    assert may_add.index(True) in range(KNOWN_STEPS, KNOWN_STEPS + WARM_STEPS) and may_add[-1]


@pytest.mark.parametrize("has_bulk", [False, True])
def test_what_will_be_left_after_a_step_is_what_is_left_then(has_bulk: bool) -> None:
    """To ask changes nothing."""
    found, state = accounts(), chat()
    found.open(state, 0.0, 0.0)
    runs = [(state, PROMPT, 0)]
    elapsed_s = alone_s(runs) + 0.003 * has_bulk
    before_s = found.left_s([state])
    expected_s = found.left_after_s([state], runs, elapsed_s, is_protected=not has_bulk)
    assert found.left_s([state]) == before_s
    if has_bulk:
        found.add_shared_step(runs, elapsed_s, 0.0)
    else:
        found.add_step(runs, elapsed_s, 0.0, is_typical=False)
    assert found.left_s([state]) == expected_s != before_s


def test_bulk_adds_to_the_first_step_of_a_request_by_its_fixed_cost() -> None:
    """Else bulk would wait for ever where some request has always just come, as on a GPU with many chats."""
    found, state = accounts(), chat()
    found.open(state, 0.0, 0.0)
    assert found.left_s([state]) == 0
    assert found.fixed_s == pytest.approx(TRUE.step_s, rel=0.01)
    assert found.left_s([state], found.fixed_s) == pytest.approx(0.25 * TRUE.step_s, rel=0.01)


def test_a_request_pays_for_what_was_left_of_the_step_that_it_found() -> None:
    found, early, late = accounts(), chat(), chat()
    found.open(early, 0.01, 1.0)
    found.open(late, 0.03, 1.0)
    found.add_shared_step([], 0.04, 0.0)
    assert found.left_s([early]) == pytest.approx(-0.03)
    assert found.left_s([late]) == pytest.approx(-0.01)
    assert found.left_s([early, late]) == found.left_s([early]), "the one that allows least"


def test_the_work_of_other_requests_earns_nothing() -> None:
    """Whoever is slowed down meets more of them."""
    found, one, other = accounts(), chat(), chat(name="other")
    for state in (one, other):
        found.open(state, 0.0, 0.0)
    found.add_step(
        [(one, 1, PROMPT), (other, 40, 0)], alone_s([(one, 1, PROMPT), (other, 40, 0)]), 0.0, is_typical=True
    )
    assert found.left_s([one]) == pytest.approx(0.25 * alone_s([(one, 1, PROMPT)]), rel=0.1)
    assert found.left_s([other]) == pytest.approx(0.25 * alone_s([(other, 40, 0)]), rel=0.1)


def test_the_time_of_the_host_counts_as_time_alone() -> None:
    found, state = accounts(), chat()
    found.open(state, 0.0, 0.0)
    found.add_step([(state, 1, PROMPT)], alone_s([(state, 1, PROMPT)]), 0.008, is_typical=True)
    assert found.left_s([state]) == pytest.approx(0.25 * (alone_s([(state, 1, PROMPT)]) + 0.008), rel=0.05)


def test_a_tier_without_max_slowdown_limits_nothing() -> None:
    found, state = accounts(), chat(None)
    found.open(state, 0.0, 0.0)
    found.add_shared_step([], 5.0, 0.0)
    assert found.left_s([state]) == found.left_s([]) == NEVER_S
