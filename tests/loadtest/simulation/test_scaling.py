"""Simulated workers that come and go as the scale signal says: as many as are needed, and none turns back."""

from itertools import pairwise

import pytest

from loadtest.simulation.clients import UNFINISHED
from loadtest.simulation.deployment import Scaling, Setting
from loadtest.simulation.observation import Observation
from loadtest.simulation.run import simulate
from loadtest.simulation.summary import summarize
from loadtest.simulation.traffic import scenario_traffic
from loadtest.traffic.scenario import Scenario
from tests.loadtest.simulation.builders import check_laws, make_card, make_tiers
from tests.marks import mostly_full

COSTS = {"step_s": 0.03, "prefill_token_s": 0.0005, "attend_s": 1e-8, "context_token_s": 1e-6, "decode_s": 0.001}
STEP_S, DURATION_S, START_S = 40.0, 120.0, 5.0


def run(factor: float, seed: int, *, with_bulk: bool = False) -> Observation:
    """Chats come `factor` times as fast from `STEP_S` on."""
    cycle = [{"for_s": STEP_S, "factor": 1.0}, {"for_s": 1000, "factor": factor}]
    chat = {
        "role": "interactive",
        "service_tier": "default",
        "arrivals": {"rate_per_s": 2.0, "cycle": cycle},
        "prompt_tokens": {"min": 100, "max": 500},
        "output_tokens": {"min": 20, "max": 60},
    }
    bulk = {
        "role": "bulk",
        "service_tier": "flex",
        "arrivals": {"streams": 8},
        "prompt_tokens": {"min": 50, "max": 100},
        "output_tokens": {"min": 50, "max": 100},
    }
    tiers = make_tiers()
    scenario = Scenario.model_validate({"classes": {"chat": chat} | ({"bulk": bulk} if with_bulk else {})})
    setting = Setting(tiers, make_card(decode=COSTS, mixed=COSTS), scaling=Scaling(20, START_S), seed=seed)
    observation = simulate(setting, scenario_traffic(scenario, tiers, DURATION_S, seed), DURATION_S, drain_s=60.0)
    check_laws(observation, tiers)
    assert not any(r.rejected or r.failed not in ("", UNFINISHED) for r in observation.requests)
    return observation


def numbers(observation: Observation) -> list[int]:
    """Return the number of workers at the end of each second of the load."""
    return [m.workers for m in observation.moments if m.at_s <= observation.duration_s]


@pytest.mark.parametrize("seed", mostly_full((1, 2, 3, 4), 1))
def test_a_threefold_step_is_followed_without_turning_back(seed: int) -> None:
    observation = run(3.0, seed)
    workers = numbers(observation)
    before, after = workers[int(STEP_S) - 1], workers[int(STEP_S) :]
    assert max(after[:30]) > before, "shares are averages of ten seconds"
    turns = [b - a for a, b in pairwise(after) if a != b]
    assert sum(a * b < 0 for a, b in pairwise(turns)) <= 1
    assert 2 * before <= max(after) <= 4 * before
    late = [r for r in observation.requests if r.arrived_s > STEP_S + 50.0]
    kept = sum(r.ttft_s is not None and r.ttft_s <= 0.5 for r in late)
    assert kept >= 0.8 * len(late)


def test_a_few_requests_at_a_time_want_no_more_workers_for_steps_that_are_nearly_empty() -> None:
    """Three chats without a pause keep three workers busy, each with steps of one row; one worker does them as well."""
    loops = {
        "role": "interactive",
        "service_tier": "default",
        "arrivals": {"streams": 3},
        "prompt_tokens": {"min": 20, "max": 50},
        "output_tokens": {"min": 50, "max": 100},
    }
    tiers, scenario = make_tiers(), Scenario.model_validate({"classes": {"chat": loops}})
    setting = Setting(tiers, make_card(decode=COSTS, mixed=COSTS), scaling=Scaling(20, START_S))
    observation = simulate(setting, scenario_traffic(scenario, tiers, 60.0, 1), 60.0, drain_s=60.0)
    assert numbers(observation)[-30:] == [1] * 30


@pytest.mark.parametrize("seed", [1, 2])
def test_workers_leave_when_the_load_does_and_nothing_is_lost(seed: int) -> None:
    observation = run(0.1, seed, with_bulk=True)
    workers = numbers(observation)
    assert workers[-1] < max(workers)
    engines = summarize(observation, make_tiers()).engines
    assert (engines.workers, engines.mean_workers) == (max(workers), pytest.approx(sum(workers) / len(workers)))
