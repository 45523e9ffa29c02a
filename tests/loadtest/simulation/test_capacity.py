"""The search for enough: it ends at the edge, wherever that is, and says so where there is none."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulation.capacity import MOST_WORKERS, RATE_BOUNDS, RATE_WIDTH, fewest_workers, highest_rate
from loadtest.simulation.observation import EngineRecord, Observation
from loadtest.simulation.summary import SloVerdict, Summary, summarize
from tests.loadtest.simulation.builders import make_tiers


def make_summary(is_kept: bool, busy_share: float = 0.5) -> Summary:
    nothing = summarize(Observation(1.0, {}, engines=[EngineRecord(busy_s=busy_share)]), make_tiers())
    return replace(nothing, slos=[SloVerdict("realtime", "TTFT p99", 1.0, 1.0, is_kept)])


@given(st.integers(1, MOST_WORKERS))
def test_the_fewest_workers_are_found(needed: int) -> None:
    found = fewest_workers(lambda n: make_summary(n >= needed))
    assert found.best is not None and found.best.amount == needed
    amounts = [probe.amount for probe in found.probes]
    assert len(set(amounts)) == len(amounts) <= 21, "no amount is tried twice"


@given(st.floats(RATE_BOUNDS[0], RATE_BOUNDS[1] / 1.01))
def test_the_highest_rate_is_found(limit: float) -> None:
    found = highest_rate(lambda rate: make_summary(rate <= limit))
    assert found.best is not None
    assert found.best.amount <= limit <= found.best.amount * (1 + RATE_WIDTH) * 1.0001


@pytest.mark.parametrize("search", [fewest_workers, highest_rate])
def test_where_nothing_is_enough_nothing_is_found(search: object) -> None:
    assert callable(search)
    found = search(lambda amount: make_summary(False))
    assert found.best is None and found.probes


def test_more_idle_engines_are_not_tried() -> None:
    found = fewest_workers(lambda n: make_summary(False, busy_share=1 / n))
    assert found.best is None and found.probes[-1].amount == 64


def test_a_rate_without_limit_ends_at_the_bound() -> None:
    found = highest_rate(lambda rate: make_summary(True))
    assert found.best is not None and found.best.amount == RATE_BOUNDS[1]
