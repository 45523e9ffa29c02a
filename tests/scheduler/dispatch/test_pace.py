import random

import pytest

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.model import StepTimeModel
from scheduler.dispatch.pace import SeenStep, UpstreamPace
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_decode

COST = StepCost(step_s=0.02, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.0005)


def run_steps(pace: UpstreamPace, steps: int, seed: int) -> list[SeenStep]:
    """Play a server's steps: streams of changing number, whose tokens arrive in bursts in any order."""
    rng, now, seen = random.Random(seed), 0.0, []
    running: dict[RequestState, int] = {}  # stream → tokens until its end
    for step in range(steps):
        new = {make_decode(f"s{step}", prompt=rng.randint(20, 200)): rng.randint(5, 60)} if rng.random() < 0.3 else {}
        if not new and not running:
            continue
        work = StepWork()
        for state in running:
            work.add(1, state.num_tokens)
        for state in new:
            work.add(state.num_tokens, 0)
        now += COST.of(work)
        burst = [(state, 0) for state in running] + [(state, state.num_tokens) for state in new]
        rng.shuffle(burst)
        for position, (state, prefilled) in enumerate(burst):
            found = pace.note_tokens(state, 1, prefilled, now + 1e-4 * position)
            seen += [found] if found is not None else []
        running |= new
        for state in list(running):
            running[state] -= 1
            if not running[state]:
                del running[state]
                pace.forget(state.id)
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_the_costs_are_learned_from_bursts(seed: int) -> None:
    pace = UpstreamPace(StepTimeModel())
    seen = run_steps(pace, 1200, seed)
    assert len(seen) > 400
    assert pace.model.is_warm
    errors = [abs(step.predicted_s / step.elapsed_s - 1) for step in seen[-200:]]
    assert sorted(errors)[len(errors) // 2] < 0.1, "half of the last steps are predicted to a tenth"


def test_several_tokens_at_once_say_nothing_about_a_step() -> None:
    pace, state = UpstreamPace(StepTimeModel()), make_decode("a")
    pace.note_tokens(state, 1, 32, 0.0)
    assert pace.note_tokens(state, 4, 0, 0.1) is None
    assert pace.note_tokens(state, 1, 0, 0.2) is None, "the step with four tokens is over, and of unknown length"
    step = pace.note_tokens(state, 1, 0, 0.3)
    assert step is not None and step.elapsed_s == pytest.approx(0.1)


def test_the_time_of_a_step_is_shared_by_the_tiers() -> None:
    pace = UpstreamPace(StepTimeModel())
    chat, bulk = make_decode("chat", "realtime"), [make_decode(f"b{i}") for i in range(3)]
    for step in range(4):
        for position, state in enumerate([chat, *bulk]):
            seen = pace.note_tokens(state, 1, 0, 0.1 * step + 1e-4 * position)
            if seen is not None:
                assert seen.sequences == {"realtime": 1, "bulk": 3}
                assert sum(seen.used_s.values()) == pytest.approx(seen.elapsed_s)
                assert seen.used_s["bulk"] == pytest.approx(3 * seen.used_s["realtime"])
