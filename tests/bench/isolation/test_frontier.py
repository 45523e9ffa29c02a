"""The frontier: an experiment whose arms differ in `max_slowdown`, and its goals for known points."""

import json
from pathlib import Path

import pytest

from bench.isolation.arms import BULK_SHIPPED, UNLIMITED, ArmBuilder, read_shipped_tiers
from bench.isolation.controls import Evidence
from bench.isolation.goals import harvest_at, harvest_limits, judge
from bench.isolation.rounds import Rounds
from bench.isolation.summary import summarize_arms
from loadtest.traffic.scenario import Targets
from scheduler.config import parse_tiers
from tests.bench.isolation.builders import SCENARIO, answered, make_part
from tests.bench.isolation.test_command import quick
from tests.loadtest.fake_server import FakeServer


async def test_every_setting_is_an_arm_and_the_load_is_the_scenarios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = json.loads(SCENARIO.model_dump_json(exclude_none=True))["classes"]
    classes["chat"]["arrivals"]["rate_per_s"] = 30
    scenario, result_file = tmp_path / "small.yaml", tmp_path / "frontier.json"
    scenario.write_text(json.dumps({"classes": classes}))
    async with FakeServer() as ours, FakeServer() as vllm:
        flags = {"experiment": "frontier", "arms": "A0,A1,B0,OURS,S4,S1.25,FREE", "peer_url": vllm.url}
        files = {"scenario": str(scenario), "json": result_file, "report": tmp_path}
        await quick(ours.url, **flags, **files).measure()
    result = json.loads(result_file.read_text())
    assert list(result["arms"]) == ["A0", "A1", "B0", "OURS", "S1.25", "S4", "FREE", "X0", "XB", "X1"]
    assert (result["clients"], result["load"], result["solo_goodput"]) == (1.0, 1.0, None)
    told = [document["tiers"]["realtime"].get("max_slowdown") for document in ours.tiers if document]
    assert {1.25, 4.0} <= set(told) and vllm.tiers == []
    assert "bulk harvest at an E2E slowdown of 1.25 ÷ its limit" in capsys.readouterr().out
    page = (tmp_path / "index.html").read_text()
    assert "Harvest against slowdown" in page and "max_slowdown 1.25" in page


def test_the_arms_differ_in_one_key_each() -> None:
    shipped = read_shipped_tiers()
    builder = ArmBuilder(shipped, Targets())
    assert builder.build(BULK_SHIPPED).tiers == shipped
    unlimited = builder.build(UNLIMITED).tiers
    assert unlimited is not None and unlimited["tiers"] == shipped["tiers"]
    assert not parse_tiers(unlimited).controller.feed_forward and parse_tiers(shipped).controller.feed_forward
    slower = builder.build("S1.5").tiers
    assert slower is not None
    assert {name: t["max_slowdown"] for name, t in slower["tiers"].items() if "max_slowdown" in t} == {"realtime": 1.5}


def test_the_harvest_is_judged_by_its_limit() -> None:
    """Chats alone use half of the engine; beside bulk they take 1.5 times as long, and bulk gets 0.4 of its rate."""
    arms = {name: ArmBuilder(read_shipped_tiers(), Targets()).build(name) for name in ("A0", "A1", "S1.5")}
    bulk = [answered("backlog", 1.0, 0.1, tokens=100)]
    some = [answered("backlog", 1.0, 0.1, tokens=40)]
    busy = [f"tidegate_step_seconds_sum {seconds}" for seconds in (0, 5)]
    parts = {
        "A0": [make_part(arms["A0"], [answered("chat", 1.0, 1.0)], [], busy)],
        "A1": [make_part(arms["A1"], [], bulk)],
        "S1.5": [make_part(arms["S1.5"], [answered("chat", 1.0, 1.5)], some)],
    }
    seen = summarize_arms(Rounds(parts), SCENARIO, {"chat": Targets()})
    limit = 0.5**1.5 + (1 - 0.5**1.5) / 3
    assert harvest_limits(seen, [1.5]) == [(1.5, pytest.approx(limit))]
    judged = {goal.name: goal for goal in judge(Evidence("frontier", seen))[0]}
    goal = judged["bulk harvest at an E2E slowdown of 1.5 ÷ its limit"]
    assert goal.value == pytest.approx(0.4 / limit) and goal.verdict == "missed"
    del seen["A0"]
    assert harvest_limits(seen, [1.5]) == []


def test_the_harvest_between_two_points_lies_on_their_line() -> None:
    points = [(2.0, 0.6), (1.2, 0.4), (3.0, 0.5)]
    assert harvest_at(1.2, points) == pytest.approx(0.4)
    assert harvest_at(1.6, points) == pytest.approx(0.5)
    assert harvest_at(1.1, points) == pytest.approx(0.2)  # between nothing at 1.0 and the first point
    assert harvest_at(4.0, points) == pytest.approx(0.6)  # a slower point with less bulk says nothing
    assert harvest_at(2.0, []) == 0.0
