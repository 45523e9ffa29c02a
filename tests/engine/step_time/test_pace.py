"""A change of the engine's pace: another program takes the processor for some seconds, and then it stops.

It must be followed within ten steps, down and up again, and leave nothing behind. Noise and single slow steps are no
change of pace.
"""

import random
from collections.abc import Callable, Iterator
from statistics import median

import pytest

from engine.step_time.cost import StepCost
from engine.step_time.model import StepTimeModel
from tests.engine.step_time.test_model import decodes_only, either, make_work, true_duration

Runs = list[tuple[int, int]]
NOISE = 0.06
FEW = 10  # steps within which a change must be followed


def mixed_only(rng: random.Random) -> Runs:
    return [*decodes_only(rng)[: rng.randint(1, 32)], (rng.randint(16, 400), rng.randint(0, 900))]


SEEDS = pytest.mark.parametrize("seed", range(5))
MIXES = pytest.mark.parametrize("mix", [decodes_only, mixed_only, either])
Mix = Callable[[random.Random], Runs]


class Engine:
    """An engine whose steps take `pace` times as long as usual, and a model that observes them."""

    def __init__(self, mix: Mix = either, seed: int = 1) -> None:
        self.model, self.mix, self.pace = StepTimeModel(), mix, 1.0
        self.steps, self.noise = random.Random(seed), random.Random(seed + 1000)

    def run(self, steps: int, noise: float = NOISE, factors: Iterator[float] | None = None) -> list[float]:
        """Run steps. Return predicted ÷ true time for each, without noise; `factors` slow down single steps."""
        ratios = []
        for _ in range(steps):
            runs = self.mix(self.steps)
            work, seconds = make_work(*runs), true_duration(*runs) * self.pace
            ratios.append(self.model.predict(work) / seconds)
            factor = max(0.1, self.noise.gauss(1.0, noise)) * (next(factors) if factors else 1.0)
            self.model.observe(work, seconds * factor)
        return ratios

    def safety(self) -> float:
        """Return the safety factor of decode-only steps."""
        runs = decodes_only(self.steps)
        return self.model.cost(mixed=False).of(make_work(*runs)) / self.model.predict(make_work(*runs))


def error(ratios: list[float]) -> float:
    return sum(abs(r - 1) for r in ratios) / len(ratios)


def median_error(ratios: list[float]) -> float:
    return median(abs(r - 1) for r in ratios)


@MIXES
@SEEDS
@pytest.mark.parametrize(
    ("pace", "steps"),
    [(2.0, FEW), (3.0, FEW), (5.0, FEW), (10.0, FEW), (0.5, FEW), (1.25, 2 * FEW), (1.5, 2 * FEW), (1.75, 2 * FEW)],
)
def test_a_change_of_pace_is_followed_and_back(pace: float, steps: int, seed: int, mix: Mix) -> None:
    """A small change takes twice as many steps."""
    engine = Engine(mix, seed)
    engine.run(400)
    for engine.pace in (pace, 1.0):
        engine.run(steps)
        assert median_error(engine.run(FEW)) < 0.15
        engine.run(100)


@pytest.mark.parametrize("pace", [2.0, 5.0])
def test_a_change_seen_in_decodes_applies_to_prefills(pace: float) -> None:
    engine = Engine()
    engine.run(600)
    engine.pace, engine.mix = pace, decodes_only
    engine.run(FEW)
    engine.mix = mixed_only
    assert median_error(engine.run(3)) < 0.15


@MIXES
@pytest.mark.parametrize("pace", [2.0, 5.0])
def test_a_disturbance_does_not_change_the_coefficients(pace: float, mix: Mix) -> None:
    disturbed, calm = Engine(), Engine()
    for engine in (disturbed, calm):
        engine.run(400)
        engine.mix, engine.pace = mix, pace if engine is disturbed else 1.0
        engine.run(150)
        engine.pace = 1.0
        engine.run(FEW)
        engine.mix = either
    assert error(disturbed.run(40)) < error(calm.run(40)) + 0.02


@pytest.mark.parametrize("mix", [decodes_only, mixed_only])
def test_the_minimum_step_time_outlives_a_disturbance(mix: Mix) -> None:
    engine = Engine(mix)
    engine.run(400)
    before = engine.model.cost().min_step_s
    for engine.pace in (5.0, 1.0):
        engine.run(200)
    assert engine.model.cost().min_step_s == pytest.approx(before, rel=0.3)


@SEEDS
def test_the_safety_factor_comes_back_soon_after_a_noisy_disturbance(seed: int) -> None:
    engine = Engine(decodes_only, seed)
    engine.run(400)
    before = engine.safety()
    engine.pace = 3.0
    engine.run(200, noise=0.3)
    during = engine.safety()
    engine.pace = 1.0
    engine.run(60)
    assert during > before + 0.2, "planning allows for the noise"
    assert engine.safety() < before + 0.5 * (during - before)


def every(number: int, factor: float) -> Iterator[float]:
    """Yield `factor` for every `number`-th step, and 1 for the others."""
    while True:
        yield from [1.0] * (number - 1)
        yield factor


@MIXES
@pytest.mark.parametrize("factor", [3.0, 100.0])
def test_single_outliers_move_nothing(factor: float, mix: Mix) -> None:
    engine, calm = Engine(mix), Engine(mix)
    for each in (engine, calm):
        each.run(400)
    ratios = engine.run(200, factors=every(20, factor))
    assert error(ratios) < error(calm.run(200)) + 0.02


@MIXES
@pytest.mark.parametrize("factors", [(0.75, 1.35), (1.0, 2.0)])
def test_alternating_noise_moves_nothing(factors: tuple[float, float], mix: Mix) -> None:
    """Successive predictions for the same work stay close together."""
    spreads = []
    for seed in range(1, 7):
        engine = Engine(mix, seed)
        engine.run(400)
        ratios = engine.run(300, factors=iter(factors * 150))[200:]
        spreads.append(max(ratios) / min(ratios))
    assert sum(spreads) / len(spreads) < 1.3


@pytest.mark.parametrize(
    ("mix", "noise", "without"),
    [
        (decodes_only, 0.02, 0.0038),
        (decodes_only, 0.06, 0.0116),
        (decodes_only, 0.2, 0.0403),
        (mixed_only, 0.02, 0.0043),
        (mixed_only, 0.06, 0.0129),
        (mixed_only, 0.2, 0.0488),
        (either, 0.02, 0.0050),
        (either, 0.06, 0.0137),
        (either, 0.2, 0.0503),
    ],
)
def test_following_the_pace_costs_little_where_there_is_only_noise(mix: Mix, noise: float, without: float) -> None:
    """`without` is the error of a model that followed every change slowly, at most 3.4 % a step."""
    assert sum(error(Engine(mix, seed).run(1200, noise)[200:]) for seed in range(3)) / 3 < 1.05 * without


@pytest.mark.parametrize(("noise", "limit"), [(0.1, 0.15), (0.2, 0.2), (0.4, 0.5)])
def test_noise_leaves_the_costs_of_steps_that_do_not_run(noise: float, limit: float) -> None:
    """The slowdown must not rise for ever while the costs of the steps that run fall."""
    engine = Engine()
    engine.run(600)
    engine.mix = decodes_only
    ratios = engine.run(6000, noise)
    assert sum(ratios[-1000:]) / 1000 == pytest.approx(1.0, abs=0.04)
    engine.mix = mixed_only
    assert median_error(engine.run(5, noise=0.0)) < limit


@pytest.mark.parametrize("decode_s", [0.018, 0.0015, 0.00002])
def test_more_sequences_than_were_ever_seen_are_no_other_pace(decode_s: float) -> None:
    """One sequence at a time tells nothing of what a step of five takes, whether it is more or less than expected."""
    truth, rng = StepCost(step_s=0.01, decode_s=decode_s), random.Random(1)
    one, five = ([(1, 100)] * count for count in (1, 5))
    model = StepTimeModel()
    for runs in (*[one] * 600, *[five] * 100):
        model.observe(make_work(*runs), truth.of(make_work(*runs)) * rng.gauss(1.0, NOISE))
    assert [model.predict(make_work(*runs)) for runs in (one, five)] == [
        pytest.approx(truth.of(make_work(*runs)), rel=0.1) for runs in (one, five)
    ]


def test_work_never_seen_before_is_learned_and_is_no_change_of_pace() -> None:
    """All steps of a new kind take twice as long as predicted, for as long as they come."""

    def long_prefills(rng: random.Random) -> Runs:
        return [(rng.randint(500, 700), 0)]

    engine = Engine(decodes_only)
    engine.run(300)
    engine.mix = long_prefills
    engine.run(40)
    engine.mix = decodes_only
    assert error(engine.run(FEW)) < 0.1, "decodes are as fast as before"
    engine.mix = long_prefills
    assert error(engine.run(FEW)) < 0.1
