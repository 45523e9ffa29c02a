"""The simulator against a measured run: against itself it is exact, against a slower machine it says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.isolation.arms import Arm
from bench.isolation.results.result import requests_of
from bench.isolation.rounds import Part, Rounds
from bench.simulator_accuracy import ComparisonError, accuracy_record, compare_arm, read_result
from loadtest.client.answer import Outcome
from loadtest.client.runner import ArmRun
from loadtest.client.server_metrics import Timeline
from loadtest.reporting.writers import render_text
from loadtest.simulation.cost_card import CostCard
from loadtest.simulation.deployment import Setting
from loadtest.simulation.observation import RequestRecord
from loadtest.simulation.run import simulate
from loadtest.simulation.traffic import scenario_traffic
from tests.loadtest.simulation.builders import COEFFICIENTS, make_card, make_scenario, make_tiers

SEED, PART_S, LEAD_S = 4, 10.0, 2.0
SCENARIO = make_scenario(rate_per_s=2.0, streams=8)


def as_outcome(record: RequestRecord) -> Outcome:
    index = int(record.id.removeprefix(f"{record.traffic_class}-"))
    outcome = Outcome(record.traffic_class, index, due_s=record.arrived_s, completion_tokens=record.output_tokens)
    if record.first_token_s is not None and record.last_token_s is not None:
        outcome.progress = [(record.first_token_s, record.first_tokens), (record.last_token_s, record.output_tokens)]
    outcome.finished_s, outcome.error = record.ended_s, record.failed or record.rejected or None
    return outcome


def measured(path: Path, card: CostCard) -> Path:
    """An isolation result whose real engine was a simulated one."""
    tiers = make_tiers()
    rounds = Rounds()
    for round_ in range(2):
        traffic = scenario_traffic(SCENARIO, tiers, PART_S, SEED, round_)
        setting = Setting(tiers, card, seed=round_, lead_s=LEAD_S)
        seen = simulate(setting, traffic, PART_S, drain_s=20)
        outcomes: dict[str, list[Outcome]] = {name: [] for name in traffic.classes}
        for record in seen.requests:
            outcomes[record.traffic_class].append(as_outcome(record))
        arm = Arm("OURS", ("interactive", "bulk"), tiers.document(defaults=False))
        rounds.add(Part(arm, round_, ArmRun(0.0, PART_S, outcomes), Timeline()))
    document: dict[str, Any] = {
        "seed": SEED,
        "scenario": SCENARIO.model_dump(mode="json"),
        "timing": {"duration_s": 2 * PART_S, "rounds": 2, "lead_s": LEAD_S, "settle_s": 1.0, "drain_s": 20.0},
        "arms": {"OURS": {"tiers": tiers.document(defaults=False), "classes": {"chat": {}, "bulk": {}}}},
        "requests": requests_of(rounds, {}),
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_against_itself_the_simulator_is_exact(tmp_path: Path) -> None:
    card = make_card()
    compared = compare_arm(read_result(measured(tmp_path / "result.json", card)), "OURS", card)
    assert [(c.traffic_class, c.what) for c in compared] == [("chat", "TTFT"), ("chat", "mean gap")]
    for one in compared:
        assert one.measured.count == one.simulated.count > 20
        assert one.ratios() == pytest.approx((1.0, 1.0), abs=1e-3)
    assert "largest deviation: 0." in render_text(accuracy_record("OURS", card, compared))


def test_a_card_that_is_wrong_is_seen(tmp_path: Path) -> None:
    result = read_result(measured(tmp_path / "result.json", make_card()))
    slow = {name: 1.5 * seconds for name, seconds in COEFFICIENTS.items()}
    ttft, gap = compare_arm(result, "OURS", make_card(decode=slow, mixed=slow))
    assert (ttft.ratios()[0] or 0) > 1.2 and (gap.ratios()[0] or 0) > 1.2
    later, _ = compare_arm(result, "OURS", make_card(), gateway_s=1.0)
    assert (later.simulated.p50 or 0) - (later.measured.p50 or 0) == pytest.approx(1.0, abs=1e-3)


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    path = measured(tmp_path / "result.json", make_card())
    with pytest.raises(ComparisonError, match="no arm 'A9'.*it has OURS"):
        compare_arm(read_result(path), "A9", make_card())
    path.write_text('{"seed": 1}', encoding="utf-8")
    with pytest.raises(ComparisonError, match="not a result"):
        read_result(path)
    with pytest.raises(ComparisonError, match="No such file"):
        read_result(tmp_path / "nowhere.json")
