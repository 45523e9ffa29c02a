"""The sweep: every kind of step, in the engine's bounds, with nothing left behind."""

from collections.abc import Callable
from itertools import count

import pytest

from loadtest.calibration.sweep import KINDS, Sweep, SweepLimits, repeated_mape
from scheduler.drivers.steps.step_log import StepEntry
from tests.loadtest.modeled_stepper import ModeledStepper


def ticking() -> Callable[[], float]:
    """A clock on which each look takes a hundredth of a second."""
    ticks = count()
    return lambda: next(ticks) / 100


def make_stepper(**changes: int) -> ModeledStepper:
    return ModeledStepper(**{"max_model_len": 600, "num_blocks": 400, "max_step_tokens": 256, **changes})


def swept(stepper: ModeledStepper, seconds: float = 6.0, seed: int = 1, max_decodes: int = 16) -> list[StepEntry]:
    return list(Sweep(stepper, SweepLimits(seconds, max_decodes, 500), seed, ticking()).run())


def test_there_are_steps_of_every_kind_and_size() -> None:
    entries = swept(make_stepper())
    assert len(entries) > 250
    alone = [e for e in entries if e.prefills and not e.decodes]
    both = [e for e in entries if e.prefills and e.decodes]
    decodes = [e for e in entries if not e.prefills]
    assert min(len(alone), len(both), len(decodes)) > len(entries) / len(KINDS) / 2
    assert {e.decodes for e in decodes} >= {1, 2, 4, 8}
    assert max(e.decodes for e in entries) <= 16
    assert max(e.prefill_tokens for e in entries) > 100
    assert max(e.context_tokens / e.decodes for e in decodes) > 5 * min(e.context_tokens / e.decodes for e in decodes)


@pytest.mark.parametrize("change", [{"num_blocks": 48}, {"max_step_tokens": 32}, {"max_model_len": 40}])
def test_it_fits_small_engines_and_leaves_nothing(change: dict[str, int]) -> None:
    stepper = make_stepper(**change)
    sweep = Sweep(stepper, SweepLimits(3.0, 8, 500), 1, ticking())
    assert len(list(sweep.run())) > 100
    assert stepper.engine.num_used_blocks == 0
    sweep.repeat()
    assert stepper.engine.num_used_blocks == 0


def test_a_slow_engine_gets_shorter_chunks_so_that_there_are_enough_steps() -> None:
    hurried, calm = swept(make_stepper(), seconds=1.0), swept(make_stepper(), seconds=6.0)
    assert sum(e.prefill_tokens > 64 for e in hurried) <= 3
    assert sum(e.prefill_tokens > 64 for e in calm) > 20


def test_steps_that_are_alike_say_how_noisy_the_machine_is() -> None:
    alike = Sweep(make_stepper(), SweepLimits(1.0, 16, 500), 1, ticking()).repeat()
    assert len(alike) == 3, "1, 4 and 16 decodes"
    noise = repeated_mape(alike)
    assert noise is not None and 0.02 < noise < 0.08, "the modeled engine's own is 5 %"
    assert repeated_mape([[1.0, 1.1, 0.9], [2.0]]) == pytest.approx(0.05)
    assert repeated_mape([]) is None
