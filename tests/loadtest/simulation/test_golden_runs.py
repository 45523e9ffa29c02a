"""Two simulated minutes as text. Any change of policy shows as a diff to read.

`TIDEGATE_UPDATE_GOLDEN=1 pytest tests/loadtest/simulation/test_golden_runs.py` writes the files anew. The engine has no
noise and its step times are known, so that the text is the same on every machine.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.interface import EngineInfo
from loadtest.reporting.record import Record
from loadtest.reporting.writers import render_text
from loadtest.simulation.deployment import Setting
from loadtest.simulation.observation import Observation
from loadtest.simulation.report import simulation_sections
from loadtest.simulation.run import simulate
from loadtest.simulation.summary import summarize
from loadtest.simulation.traffic import scenario_traffic
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import StepCore
from tests.loadtest.simulation.builders import make_card, make_scenario, make_tiers
from tests.scheduler.builders import KnownStepTime

HERE = Path(__file__).parent
CARD = make_card(noise=0.0, price_per_hour=1.0)
DURATION_S, SLICE_S = 60.0, 10
RUNS: dict[str, dict[str, Any]] = {
    "golden_pulse": {"rate_per_s": 2.0, "spikes": [{"at_s": 20, "for_s": 10, "factor": 4}]},
    "golden_bursts": {"rate_per_s": 1.5, "cv": 3.0, "streams": 8},
}


def build_core(tiers: TierSet, info: EngineInfo, draw: Callable[[], float], worker_id: str) -> StepCore:
    step_time = KnownStepTime(CARD.step_cost(mixed=True))
    return StepCore(
        tiers,
        info,
        SLAController(tiers, info.num_layers, suspends_steps=info.suspends_steps),
        step_time,
        worker_id,
        draw,
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_minute_goes_as_it_went(name: str) -> None:
    tiers = make_tiers()
    traffic = scenario_traffic(make_scenario(**RUNS[name]), tiers, DURATION_S, seed=1)
    observation = simulate(Setting(tiers, CARD, build_core=build_core), traffic, DURATION_S)
    record = Record(f"{name}; times in ms", simulation_sections(summarize(observation, tiers), CARD))
    text = render_text(record) + "\n" + "".join(slices(observation))
    golden = HERE / f"{name}.txt"
    if os.environ.get("TIDEGATE_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def slices(observation: Observation) -> Iterator[str]:
    yield "\nseconds | chats, worst first token (ms) | bulk: held, size | what moved\n"
    for begin_s in range(0, int(DURATION_S), SLICE_S):
        end_s = begin_s + SLICE_S
        came = [r for r in observation.requests if r.tier == "realtime" and begin_s <= r.arrived_s < end_s]
        worst_ms = max((1000 * r.ttft_s for r in came if r.ttft_s is not None), default=0.0)
        bulk = observation.moments[end_s - 1].tiers["bulk"]
        moved = dict.fromkeys(
            f"{m.decision.tier} {m.decision.knob} ({m.decision.signal})"
            for m in observation.moves
            if begin_s <= m.at_s < end_s
        )
        size, what = f"{bulk.held:4}, {bulk.batch_size:4}", ", ".join(moved) or "-"
        yield f"{begin_s:3}-{end_s:3} | {len(came):5}, {worst_ms:7.1f} | {size} | {what}\n"
