"""The experiments' loads: multiples of the solo goodput, moving as each experiment says."""

import numpy as np
import pytest

from bench.isolation.experiments import EXPERIMENTS, LoadProfile, with_load_profile
from loadtest.traffic.scenario import load_scenario
from loadtest.traffic.scenario_arrivals import OpenLoop
from loadtest.traffic.workload import plan_open_loop


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_has_a_scenario_that_is_shipped(name: str) -> None:
    assert load_scenario(EXPERIMENTS[name].scenario).with_role("interactive")


def test_isolation_keeps_the_scenarios_own_motions_at_half_the_goodput() -> None:
    scenario = load_scenario("w2-code")
    loaded = with_load_profile(scenario, EXPERIMENTS["isolation"], goodput_clients=8.0, load=0.5, part_s=30.0)
    arrivals, before = loaded.classes["code"].arrivals, scenario.classes["code"].arrivals
    assert isinstance(arrivals, OpenLoop) and isinstance(before, OpenLoop)
    assert arrivals == before.scaled(4.0) and arrivals.bursts is not None
    assert loaded.with_role("bulk") == scenario.with_role("bulk")


def test_an_overload_is_one_minute_at_three_times_the_base() -> None:
    loaded = with_load_profile(load_scenario("w3-square"), EXPERIMENTS["overload"], 20.0, 0.5, part_s=120.0)
    for name in ("typing", "chat"):
        at_s = np.array([p.at_s for p in plan_open_loop(loaded.classes[name], 120.0, 1, 0)])
        inside = ((at_s >= 20) & (at_s < 80)).sum() / 60
        outside = ((at_s < 20) | (at_s >= 80)).sum() / 60
        assert inside == pytest.approx(30, rel=0.1) and outside == pytest.approx(10, rel=0.15)


def test_a_step_lasts_to_the_end_of_the_part() -> None:
    spike = EXPERIMENTS["step"].profile.spike(30.0)
    assert spike is not None and (spike.at_s, spike.for_s, spike.factor) == (10.0, 20.0, 3.0)
    assert LoadProfile(0.5).spike(30.0) is None
    short = EXPERIMENTS["overload"].profile.spike(30.0)
    assert short is not None and short.at_s + short.for_s == 30.0
