"""The measured slowdown that bulk causes, against the truth: the same load with bulk, and without it."""

from collections.abc import Callable

import pytest

from engine.interface import EngineInfo
from loadtest.simulation.deployment import Setting, build_core
from loadtest.simulation.observation import RequestRecord
from loadtest.simulation.run import simulate
from loadtest.simulation.traffic import scenario_traffic
from loadtest.traffic.scenario import Scenario
from scheduler.config import TierSet
from scheduler.control.slowdown import Slowdown
from scheduler.drivers.steps.core import StepCore
from tests.loadtest.simulation.builders import chats, make_card, make_tiers
from tests.loadtest.simulation.test_promise import BULK, CHAT

DURATION_S = 120.0
CLASSES = {"chat": {**CHAT, "arrivals": {"rate_per_s": 0.7}}, "bulk": BULK}
FEW = {"batch_size": {"min": 1, "start": 6, "max": 6}, "floor": 0.0}  # bulk sequences that are always there


@pytest.fixture(autouse=True)
def more_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let slots take more time, so that short loads have enough of them."""
    monkeypatch.setattr("scheduler.control.slowdown.SHARE", 0.1)
    monkeypatch.setattr("scheduler.control.slowdown.MIN_SAMPLES", 10)


def played(
    seed: int, *names: str, measure: bool = False
) -> tuple[list[RequestRecord], dict[tuple[str, str], Slowdown | None]]:
    cores: list[StepCore] = []

    def build(tiers: TierSet, info: EngineInfo, draw: Callable[[], float], worker_id: str) -> StepCore:
        cores.append(build_core(tiers, info, draw, worker_id))
        return cores[-1]

    tiers = make_tiers({"measure_slowdown": measure}, bulk=FEW)
    scenario = Scenario.model_validate({"classes": {name: CLASSES[name] for name in names}})
    traffic = scenario_traffic(scenario, tiers, DURATION_S, seed)
    observation = simulate(Setting(tiers, make_card(), seed=seed, build_core=build), traffic, DURATION_S)
    return chats(observation), cores[0].running.slowdown.readings()


def answer_s(records: list[RequestRecord]) -> float:
    return sum(r.ended_s - r.arrived_s for r in records if r.ended_s is not None) / len(records)


def truth_and_estimate(seed: int) -> tuple[float, Slowdown]:
    alone, _ = played(seed, "chat")
    beside, _ = played(seed, "chat", "bulk")
    _, readings = played(seed, "chat", "bulk", measure=True)
    found = readings["realtime", "e2e"]
    assert found is not None
    return answer_s(beside) / answer_s(alone), found


def test_the_measured_slowdown_is_the_true_one() -> None:
    truth, found = truth_and_estimate(seed=1)
    assert truth > 1.1
    assert found.value == pytest.approx(truth, abs=0.06)
    assert found.low < found.value < found.high < found.low + 0.2


@pytest.mark.full
@pytest.mark.timeout(600)  # computes for a minute, and longer beside others
def test_the_interval_holds_the_truth_in_most_loads() -> None:
    cases = [truth_and_estimate(seed) for seed in range(2, 12)]
    assert sum(found.low <= truth <= found.high for truth, found in cases) >= 8
    assert sum(found.value - truth for truth, found in cases) / len(cases) == pytest.approx(0, abs=0.03)
