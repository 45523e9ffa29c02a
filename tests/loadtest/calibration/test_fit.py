"""Coefficients from logged steps: found again from steps that were made with them, and how errors are counted."""

import random
from dataclasses import replace

import pytest

from engine.step_time.cost import StepCost, StepWork
from loadtest.calibration.fit import Prediction, calibrate, errors
from scheduler.drivers.steps.step_log import StepEntry

DECODE = StepCost(0.008, 0.0, 0.0, 2e-6, 0.0009)
MIXED = StepCost(0.010, 0.0005, 3e-7, 2.5e-6, 0.0012)
HOST_S = 0.0015


def make_steps(count: int, noise: float = 0.03, seed: int = 1) -> list[StepEntry]:
    rng, t, steps = random.Random(seed), 100.0, []
    for _ in range(count):
        work = StepWork()
        for _ in range(rng.randint(1, 60)):
            work.add(1, rng.randint(10, 2000))
        if rng.random() < 0.5:
            work.add(rng.randint(16, 500), rng.randint(0, 1500))
        seconds = (MIXED if work.is_mixed else DECODE).of(work) * max(0.1, rng.gauss(1.0, noise))
        t += seconds + HOST_S
        steps.append(StepEntry.of(work, seconds, t))
    return steps


def test_both_sets_of_coefficients_are_found() -> None:
    calibration = calibrate(make_steps(1500))
    for fit, truth in ((calibration.decode, DECODE), (calibration.mixed, MIXED)):
        for name in ("step_s", "prefill_token_s", "attend_s", "context_token_s", "decode_s"):
            assert getattr(fit.cost, name) == pytest.approx(getattr(truth, name), rel=0.15, abs=1e-12)


def test_the_error_on_held_out_steps_is_the_noise_and_no_more() -> None:
    calibration = calibrate(make_steps(1500, noise=0.05))
    mean_of_gauss = 0.05 * 0.798
    for fit in calibration.kinds:
        assert fit.held_out.mape == pytest.approx(mean_of_gauss, rel=0.25)
        assert abs(fit.held_out.signed) < 0.015
        assert fit.held_out.ratio_p95 == pytest.approx(1 + 1.645 * 0.05, abs=0.03)
        assert fit.online is not None and fit.online.mape < 1.3 * mean_of_gauss
    assert calibration.noise == pytest.approx(0.05, rel=0.2)


def test_outliers_do_not_count() -> None:
    steps = make_steps(1500)
    rng = random.Random(2)
    spoiled = [replace(s, elapsed_s=20 * s.elapsed_s) if rng.random() < 0.02 else s for s in steps]
    calibration = calibrate(spoiled)
    assert calibration.decode.outliers + calibration.mixed.outliers > 10
    assert calibration.mixed.cost.prefill_token_s == pytest.approx(MIXED.prefill_token_s, rel=0.15)
    assert calibration.decode.cost.decode_s == pytest.approx(DECODE.decode_s, rel=0.15)


def test_the_hosts_time_between_two_steps_is_their_gap_where_there_was_work() -> None:
    steps = make_steps(400)
    assert calibrate(steps).host_overhead_s == pytest.approx(HOST_S, rel=0.01)
    rested = [replace(s, t=s.t + 60.0 * (i // 100)) for i, s in enumerate(steps)]
    assert calibrate(rested).host_overhead_s == pytest.approx(HOST_S, rel=0.01)


def test_no_coefficient_is_negative_whatever_was_measured() -> None:
    rng = random.Random(4)
    nonsense = [replace(s, elapsed_s=rng.uniform(0.001, 1.0)) for s in make_steps(600)]
    for fit in calibrate(nonsense).kinds:
        assert min(fit.cost.step_s, fit.cost.prefill_token_s, fit.cost.attend_s, fit.cost.decode_s) >= 0.0


def test_too_few_steps_of_a_kind_are_refused() -> None:
    decodes = [s for s in make_steps(600) if not s.work.is_mixed]
    with pytest.raises(ValueError, match="0 mixed steps are too few"):
        calibrate(decodes)
    with pytest.raises(ValueError, match="too few"):
        calibrate([])


def test_errors_are_relative_to_what_was_measured() -> None:
    entry = StepEntry.of(StepWork(decodes=1), 0.010, 0.0)
    found = errors([Prediction(entry, 0.011), Prediction(entry, 0.008)])
    assert found.mape == pytest.approx(0.15)
    assert found.signed == pytest.approx(-0.05)
    with pytest.raises(ValueError, match="no step"):
        errors([])
