"""The frontier against servers that answer at once, and its goals for known points."""

import json
from pathlib import Path

import pytest

from bench.isolation.arms import BOTH, Arm
from bench.peers.commands import Frontier
from bench.peers.frontier import Point, frontier_arms, harvest_at, with_max_slowdown, without_limit
from loadtest.client.http import TargetError
from loadtest.estimates import Estimate, LatencyRatios
from loadtest.shipped_tiers import read_shipped_tiers
from scheduler.config import parse_tiers
from tests.bench.isolation.builders import SCENARIO
from tests.loadtest.fake_server import FakeServer


def quick(**flags: object) -> Frontier:
    """The command with times that measure nothing."""
    times = {"duration": 0.3, "rounds": 1, "lead": 0.05, "settle": 0, "drain": 2}
    return Frontier.model_validate({**times, **flags})


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    classes = json.loads(SCENARIO.model_dump_json(exclude_none=True))["classes"]
    classes["chat"]["arrivals"]["rate_per_s"] = 30
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps({"classes": classes}))
    return path


def share_of(part: float, whole: float) -> float | None:
    return part / whole if whole else None


async def test_every_setting_gets_a_point_and_the_server_its_own_tiers_back(
    tmp_path: Path, scenario_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file, before = tmp_path / "frontier.json", read_shipped_tiers() | {"default_tier": "bulk"}
    async with FakeServer(tiers=[before]) as ours, FakeServer() as vllm:
        flags = {"url": ours.url, "peer_url": vllm.url, "scenario": str(scenario_file), "json": result_file}
        await quick(**flags, slowdowns="1.25,4", report=tmp_path).measure()
    result = json.loads(result_file.read_text())
    mixed = ["as configured", "max_slowdown 1.25", "max_slowdown 4", "unlimited", "vLLM, its priorities"]
    assert [point["name"] for point in result["points"]] == mixed
    assert all(point["slowdown"] > 0 for point in result["points"])
    for point in result["points"]:  # a busy machine can leave an arm without bulk, and its harvest is then 0
        rate = result["arms"]["vLLM, bulk alone" if "vLLM" in point["name"] else "bulk alone, unlimited"]
        assert point["harvest"] == share_of(point["bulk_tokens_per_s"], rate["bulk_tokens_per_s"])
    alone = ["alone", "bulk alone", "bulk alone, unlimited", "vLLM alone", "vLLM, bulk alone"]
    assert sorted(result["arms"]) == sorted(mixed + alone)
    assert {(r["arm"], r["class"]) for r in result["requests"]} == {
        *((name, "backlog" if "bulk" in name else "chat") for name in alone),
        *((name, class_) for name in mixed for class_ in ("backlog", "chat")),
    }
    assert ours.tiers[-1] == before and vllm.tiers == []
    told = [document["tiers"]["realtime"].get("max_slowdown") for document in ours.tiers]
    assert {1.25, 4.0, before["tiers"]["realtime"].get("max_slowdown")} == set(told)
    assert "bulk harvest at an E2E slowdown of 1.25" in capsys.readouterr().out
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 2 and "max_slowdown 1.25" in page


async def test_a_setting_that_the_server_refuses_ends_the_run_before_anything_is_measured(scenario_file: Path) -> None:
    async with FakeServer(status=lambda body: 503) as server:
        with pytest.raises(TargetError, match="as configured: no request of"):
            await quick(url=server.url, scenario=str(scenario_file)).measure()
    assert all("warm-up" in body["cache_salt"] for body in server.requests) and server.requests


def test_the_arms_differ_in_one_key_each() -> None:
    shipped = read_shipped_tiers()
    arms = {arm.name: arm for arm in frontier_arms(shipped, [1.5], has_vllm=False)}
    assert list(arms) == [
        *("alone", "bulk alone", "bulk alone, unlimited"),
        *("as configured", "max_slowdown 1.5", "unlimited"),
    ]
    assert arms["alone"].tiers == arms["bulk alone"].tiers == arms["as configured"].tiers == shipped
    unlimited = without_limit(shipped)
    assert not parse_tiers(unlimited).controller.feed_forward and parse_tiers(shipped).controller.feed_forward
    assert unlimited["tiers"] == shipped["tiers"]
    assert arms["unlimited"] == Arm("unlimited", BOTH, unlimited)
    slower = with_max_slowdown(shipped, 1.5)["tiers"]
    assert {name: tier.get("max_slowdown") for name, tier in slower.items() if "max_slowdown" in tier} == {
        "realtime": 1.5
    }


def point(slowdown: float, harvest: float, is_ours: bool = True) -> Point:
    e2e = Estimate(slowdown, slowdown, slowdown)
    return Point("any", is_ours, LatencyRatios(None, None, None, e2e, None), 1.0, 100.0, harvest)


def test_the_harvest_between_two_points_lies_on_their_line() -> None:
    points = [point(2.0, 0.6), point(1.2, 0.4), point(3.0, 0.5), point(1.1, 0.9, is_ours=False)]
    assert harvest_at(1.2, points) == pytest.approx(0.4)
    assert harvest_at(1.6, points) == pytest.approx(0.5)
    assert harvest_at(1.1, points) == pytest.approx(0.2)  # between nothing at 1.0 and the first point
    assert harvest_at(4.0, points) == pytest.approx(0.6)  # a slower point with less bulk says nothing
    assert harvest_at(2.0, []) == 0.0
