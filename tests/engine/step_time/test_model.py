"""The step-time model: what it learns from steps, and what must not disturb it."""

import random
from collections.abc import Callable

import pytest

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.model import StepTimeModel

TRUTH = StepCost(step_s=0.02, prefill_token_s=0.0004, attend_s=1e-7, context_token_s=1e-6, decode_s=0.0006)
MAX_LEN = 100_000


def make_work(*runs: tuple[int, int]) -> StepWork:
    """Return the work of runs given as (tokens, context)."""
    work = StepWork()
    for num_tokens, context in runs:
        work.add(num_tokens, context)
    return work


def duration(cost: StepCost, *runs: tuple[int, int]) -> float:
    return cost.step_s + sum(cost.run(n, c) for n, c in runs)


Mix = Callable[[random.Random], list[tuple[int, int]]]


def mixed(rng: random.Random) -> list[tuple[int, int]]:
    decodes = [(1, rng.randint(10, 900)) for _ in range(rng.randint(0, 60))]
    chunks = [(rng.randint(16, 400), rng.randint(0, 900)) for _ in range(rng.randint(0, 2))]
    return decodes + chunks or [(1, 10)]


def decodes_only(rng: random.Random) -> list[tuple[int, int]]:
    return [(1, 300)] * 32


def teach(
    model: StepTimeModel, truth: StepCost, steps: int, mix: Mix = mixed, noise: float = 0.05, seed: int = 1
) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        runs = mix(rng)
        model.observe(make_work(*runs), duration(truth, *runs) * max(0.1, rng.gauss(1.0, noise)))


def error(model: StepTimeModel, truth: StepCost, mix: Mix = mixed) -> float:
    """Return the mean of |predicted ÷ true − 1| on new steps."""
    rng = random.Random(99)
    steps = [mix(rng) for _ in range(200)]
    return sum(abs(model.predict(make_work(*r)) / duration(truth, *r) - 1) for r in steps) / len(steps)


@pytest.mark.parametrize("speed", [0.1, 1.0, 20.0], ids=["GPU", "as it is", "slow CPU"])
def test_it_learns_any_engine_within_a_few_steps(speed: float) -> None:
    truth, model = scaled(speed), StepTimeModel()
    teach(model, truth, 200)
    assert error(model, truth) < 0.10
    assert model.mean_absolute_error < 0.10


def test_the_cost_has_a_bounded_safety_factor_for_noise() -> None:
    calm, noisy = StepTimeModel(), StepTimeModel()
    teach(calm, TRUTH, 600, noise=0.0)
    teach(noisy, TRUTH, 600, noise=0.2)
    work = [(1, 300)] * 16
    assert duration(calm.cost(), *work) == pytest.approx(duration(TRUTH, *work), rel=0.02)
    assert 1.15 < duration(noisy.cost(), *work) / noisy.predict(make_work(*work)) <= 2.0


def test_before_any_step_the_prior_holds() -> None:
    model = StepTimeModel(TRUTH)
    for name in TRUTH.__dataclass_fields__:
        assert getattr(model.cost(), name) == pytest.approx(getattr(TRUTH, name))
    assert model.mean_absolute_error == 0.0


# -- decode-only and mixed steps -------------------------------------------------------------------------------------

MIXED_TRUTH = StepCost(step_s=0.03, prefill_token_s=0.0005, attend_s=1e-7, context_token_s=2e-6, decode_s=0.0012)


def either(rng: random.Random) -> list[tuple[int, int]]:
    """Draw decode-only and mixed steps equally often, of any size and with any context."""
    decodes = [(1, rng.randint(10, 2000)) for _ in range(rng.randint(1, 60))]
    return decodes if rng.random() < 0.5 else [*decodes, (rng.randint(16, 400), rng.randint(0, 900))]


def true_duration(*runs: tuple[int, int]) -> float:
    """Return the seconds of a step on an engine whose decodes cost more beside a prefill."""
    return duration(MIXED_TRUTH if any(n > 1 for n, _ in runs) else TRUTH, *runs)


def taught_both(steps: int, noise: float = 0.03) -> StepTimeModel:
    model, rng = StepTimeModel(), random.Random(5)
    for _ in range(steps):
        runs = either(rng)
        model.observe(make_work(*runs), true_duration(*runs) * rng.gauss(1.0, noise))
    return model


def test_each_kind_of_step_has_coefficients_of_its_own() -> None:
    model = taught_both(800)
    rng = random.Random(6)
    steps = [either(rng) for _ in range(200)]
    errors = [abs(model.predict(make_work(*runs)) / true_duration(*runs) - 1) for runs in steps]
    assert sum(errors) / len(errors) < 0.04, "one set for both is 13 % wrong"
    for cost, truth in ((model.cost(mixed=False), TRUTH), (model.cost(mixed=True), MIXED_TRUTH)):
        for name in ("step_s", "context_token_s", "decode_s"):
            assert getattr(cost, name) == pytest.approx(getattr(truth, name), rel=0.25)


def test_a_kind_that_was_never_seen_is_predicted_like_the_other() -> None:
    model = StepTimeModel()
    teach(model, TRUTH, 300, lambda rng: [(1, rng.randint(10, 900)) for _ in range(rng.randint(1, 60))])
    mixed_step = [*[(1, 300)] * 40, (16, 0)]
    assert model.predict(make_work(*mixed_step)) == pytest.approx(duration(TRUTH, *mixed_step), rel=0.15)


def test_both_kinds_know_the_cost_of_a_prefill() -> None:
    """A plan starts with decodes only, and asks what a prefill chunk would add."""
    model = taught_both(800, noise=0.0)
    decodes = [(1, 300)] * 30
    added_s = duration(MIXED_TRUTH, *decodes, (200, 100)) - duration(TRUTH, *decodes)
    assert model.cost(mixed=False).prefill(200, 100) == pytest.approx(added_s, rel=0.1)


# -- drift, outliers, steps that the linear model does not fit -------------------------------------------------------


def scaled(factor: float) -> StepCost:
    return StepCost(*(getattr(TRUTH, k) * factor for k in TRUTH.__dataclass_fields__))


def test_one_slow_step_moves_nothing_and_a_lasting_slowness_is_learned() -> None:
    model, work = StepTimeModel(), make_work((1, 300), (1, 200))
    teach(model, TRUTH, 500, noise=0.0)
    before = model.predict(work)
    model.observe(work, 100 * before)
    assert model.predict(work) == before
    model.observe(work, before)
    model.observe(work, 100 * before)
    assert model.predict(work) == pytest.approx(before, rel=0.01), "a normal step lay between the two slow ones"
    assert model.cost().slowdown == pytest.approx(1.0, rel=0.01)
    for _ in range(60):
        model.observe(work, 10 * before)
    assert model.predict(work) == pytest.approx(10 * before, rel=0.1)
    assert model.cost().slowdown == pytest.approx(10.0, rel=0.1)


def in_tiles(rng: random.Random) -> tuple[StepWork, float]:
    """Draw a step of decodes that are computed eight at a time, and its seconds."""
    count = rng.randint(1, 64)
    return make_work(*[(1, 100)] * count), 0.008 + 0.008 * -(-count // 8)


def test_the_safety_factor_covers_the_errors_of_the_linear_model() -> None:
    model, rng = StepTimeModel(), random.Random(9)
    for _ in range(1000):
        model.observe(*in_tiles(rng))
    fresh = [in_tiles(rng) for _ in range(300)]
    longer = sum(seconds > model.cost(mixed=False).of(work) for work, seconds in fresh)
    assert longer <= 0.08 * len(fresh)


def test_no_step_is_predicted_below_the_minimum() -> None:
    """Up to eight decodes take as long as one."""
    model, rng = StepTimeModel(), random.Random(10)
    for _ in range(1500):
        count = rng.randint(1, 40)
        model.observe(make_work(*[(1, 10)] * count), max(0.010, 0.00125 * count) * rng.gauss(1.0, 0.02))
    assert model.predict(make_work((1, 10))) == pytest.approx(0.010, rel=0.1)
    assert model.cost(mixed=False).of(make_work((1, 10))) >= 0.009


def test_the_minimum_is_not_taken_from_long_steps() -> None:
    model = StepTimeModel(TRUTH)
    teach(model, TRUTH, 400, lambda rng: [(1000, rng.randint(0, 2000))])
    assert model.cost().min_step_s < 0.2, "the shortest step took 0.47 s"
    assert model.predict(make_work((16, 0))) < 0.2


def test_where_noise_hides_the_costs_of_a_decode_no_step_is_free() -> None:
    """The fit of these steps says that neither a step nor a decode costs anything."""
    model = StepTimeModel()
    for _ in range(200):
        model.observe(make_work(*[(1, 400)] * 8), 0.040)
        model.observe(make_work((1, 100)), 0.001)
    cost = model.cost(mixed=False)
    assert cost.step_s + cost.decode_s < 1e-6, "the condition of this test"
    assert cost.step(0.0) > 0


def test_more_work_never_costs_less() -> None:
    model = taught_both(600, noise=0.1)
    rng = random.Random(11)
    for _ in range(200):
        runs = either(rng)
        more = (rng.choice([1, 1, 64]), rng.randint(0, 900))
        mixed = any(n > 1 for n, _ in runs)
        if mixed or more[0] == 1:
            cost = model.cost(mixed)
            assert cost.of(make_work(*runs, more)) >= cost.of(make_work(*runs)) >= cost.min_step_s


def test_the_reported_error_is_of_predictions_made_before_the_step() -> None:
    calm, slowing = StepTimeModel(), StepTimeModel()
    teach(calm, TRUTH, 500, noise=0.05)
    assert 0.02 < calm.mean_absolute_error < 0.06
    teach(slowing, TRUTH, 300, noise=0.0)
    before = slowing.mean_absolute_error
    for step in range(60):
        teach(slowing, scaled(1.02**step), 1, noise=0.0, seed=step)
    assert slowing.mean_absolute_error > before + 0.01, "every prediction is a little too short"


def test_a_cost_is_computed_once_between_two_steps() -> None:
    model = taught_both(100)
    assert model.cost() is model.cost()
    before = model.cost(mixed=False)
    model.observe(make_work((1, 50)), 0.02)
    assert model.cost(mixed=False) is not before
