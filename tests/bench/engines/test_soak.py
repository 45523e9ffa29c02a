"""The soak's random load against an engine that checks every plan, and its verdict."""

from itertools import count

import pytest

from bench.engines.soak import Soak, SoakResult
from loadtest.reporting.writers import render_text
from tests.loadtest.modeled_stepper import ModeledStepper

MIB = 1 << 20
STEPS_PER_S = 1000  # of the tests' clock


def make_soak(stepper: ModeledStepper, seed: int) -> Soak:
    """A soak on a clock of its own, so that a step takes the same time on any machine."""
    readings = count()
    return Soak(stepper, seed, lambda: next(readings) / STEPS_PER_S)


def make_result(rss: tuple[int, ...], blocks_lost: int = 0, finished: int = 3) -> SoakResult:
    return SoakResult(1.0, 10, 20, finished, 1, {"pause": 2}, rss, blocks_lost)


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_legal_and_every_block_comes_back(seed: int) -> None:
    stepper = ModeledStepper(num_blocks=80)
    result = make_soak(stepper, seed).run(seconds=0.4)
    assert result.blocks_lost == 0 and stepper.engine.num_used_blocks == 0
    assert result.finished > 0 and result.aborted > 0
    assert min(result.preemptions.values()) > 0 and set(result.preemptions) == {"pause", "recompute"}
    assert result.steps == len(stepper.plans) - 1 and len(result.rss_bytes) > 2


def test_memory_that_grows_fails() -> None:
    flat, grown = make_result((100 * MIB,) * 10), make_result((100 * MIB,) * 5 + (103 * MIB,) * 5)
    assert flat.passed and "flat" in render_text(flat.record())
    assert not grown.passed and grown.growth == pytest.approx(0.03) and "GREW" in render_text(grown.record())


def test_lost_blocks_and_a_soak_that_finished_nothing_fail() -> None:
    assert not make_result((MIB,) * 4, blocks_lost=2).passed
    assert "LOST: 2" in render_text(make_result((MIB,) * 4, blocks_lost=2).record())
    assert not make_result((MIB,) * 4, finished=0).passed
