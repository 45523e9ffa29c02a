"""Scenarios: all that are shipped load, and a wrong one names its key."""

from pathlib import Path

import pytest

from loadtest.traffic.scenario import ScenarioError, load_scenario, shipped_pools, shipped_scenarios
from loadtest.traffic.scenario_arrivals import ClosedLoop


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_scenarios_load_and_say_what_they_are(name: str) -> None:
    scenario = load_scenario(name, needed=["interactive"])
    assert scenario.description


def test_the_peers_scenario_is_the_load_that_was_published() -> None:
    classes = load_scenario("peers").classes
    assert classes["backlog"].arrivals == ClosedLoop(streams=64)
    assert classes["backlog"].output_tokens.min == classes["backlog"].output_tokens.max == 128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: {}", "classes: "),
        ("classes: {a: {role: bulk, arrivals: {streams: 0}}}", "classes.a.arrivals"),
        ("classes: {a: {role: bulk, arrivals: {streams: 1}, prompt_tokens: 1, output_tokens: 1}}", "role interactive"),
        ("classes: {a: {rolle: bulk}}", "classes.a.rolle"),
        ("{bulk_pool: b9, classes: {}}", "b1-summaries"),
        (
            "{classes: {a: {role: bulk, sessions: {turns_mean: 2, think_s: 1, max_tokens: 9, documents: 0.5}}}}",
            "sessions",
        ),
        ("[", "not YAML"),
    ],
)
def test_a_wrong_scenario_names_its_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=message):
        load_scenario(str(path))


def test_an_unknown_scenario_names_the_shipped_ones() -> None:
    with pytest.raises(ScenarioError, match="chat-and-bulk"):
        load_scenario("no-such-scenario")


@pytest.mark.parametrize("name", shipped_pools())
def test_a_bulk_pool_replaces_the_bulk_of_any_scenario(name: str) -> None:
    own, other = load_scenario("w1-chat"), load_scenario("w1-chat", bulk_pool=name)
    assert own.with_role("interactive") == other.with_role("interactive")
    assert other.bulk_pool == name and isinstance(other.with_role("bulk")[0].arrivals, ClosedLoop)
    assert load_scenario("chat-and-bulk", bulk_pool=name).with_role("bulk") == other.with_role("bulk")


def test_scaling_of_lengths_leaves_spread_and_load() -> None:
    scenario = load_scenario("w4-agents")
    agent = scenario.with_lengths_scaled(0.125).classes["agent"]
    assert agent.arrivals == scenario.classes["agent"].arrivals
    assert (agent.prompt_tokens.median, agent.prompt_tokens.sigma) == (15, 0.8)
    assert agent.prefixes is not None and (agent.prefixes.tokens.min, agent.prefixes.count) == (50, 8)
    assert agent.sessions is not None and agent.sessions.max_tokens == 1024
    assert scenario.scale_for(None) == scenario.scale_for(10**6) == 1.0 and scenario.scale_for(1024) == 0.125


def test_scaling_of_load_scales_the_streams_of_interactive_closed_loops() -> None:
    saturation = load_scenario("saturation", needed=())
    scaled = [saturation.with_load_scaled(rate).classes["chat"].arrivals for rate in (0.001, 0.25, 4.0)]
    assert scaled == [ClosedLoop(streams=streams) for streams in (1, 8, 128)]


def test_another_service_tier_is_asked_for_by_interactive_classes_only() -> None:
    scenario = load_scenario("bursts")
    moved = scenario.with_service_tier("flex")
    assert {c.service_tier for c in moved.with_role("interactive")} == {"flex"}
    assert moved.with_role("bulk") == scenario.with_role("bulk") and list(moved.classes) == list(scenario.classes)
