"""Scenarios: all that are shipped load, and a wrong one names its key."""

from pathlib import Path

import pytest

from loadtest.scenario import ClosedLoop, ScenarioError, load_scenario, shipped_scenarios


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_scenarios_load_and_say_what_they_are(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.description
    assert scenario.with_role("interactive") and scenario.with_role("bulk")


def test_the_peers_scenario_is_the_load_that_was_published() -> None:
    classes = load_scenario("peers").classes
    assert classes["backlog"].arrivals == ClosedLoop(streams=64)
    assert classes["backlog"].output_tokens.min == classes["backlog"].output_tokens.max == 128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: {}", "classes: "),
        ("classes: {a: {role: bulk, arrivals: {streams: 0}}}", "classes.a.arrivals"),
        ("classes: {a: {role: bulk, arrivals: {streams: 1}, prompt_tokens: 1, output_tokens: 1}}", "each role"),
        ("classes: {a: {rolle: bulk}}", "classes.a.rolle"),
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
