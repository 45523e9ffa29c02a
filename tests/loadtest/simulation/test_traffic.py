"""Traffic: more load is more of the same clients, less is fewer of them, and prompts share what they should."""

from itertools import islice

import pytest

from loadtest.simulation.traffic import OfferedRequest, TraceRow, Traffic, TrafficError, scenario_traffic, trace_traffic
from loadtest.traffic.scenario import Scenario, load_scenario
from tests.loadtest.simulation.builders import make_scenario, make_tiers


def make_rows(count: int, **more: object) -> list[TraceRow]:
    return [
        TraceRow.model_validate(
            {"arrival_s": i / 2, "tier": "default", "prompt_tokens": 10 + i % 7, "output_tokens": 3, **more}
        )
        for i in range(count)
    ]


def trace(rate: float, rows: list[TraceRow]) -> Traffic:
    return trace_traffic(rows, make_tiers(), 100, seed=3, rate=rate)


def test_a_scenario_becomes_arrivals_and_closed_loops() -> None:
    traffic = scenario_traffic(make_scenario(rate_per_s=5), make_tiers(), 20, seed=1)
    assert traffic.classes == {"chat": "realtime", "bulk": "bulk"}
    assert 60 < len(traffic.arrivals) < 140
    assert [r.at_s for r in traffic.arrivals] == sorted(r.at_s for r in traffic.arrivals)
    (backlog,) = traffic.loops
    first = list(islice(backlog.requests, 300))
    assert backlog.streams == 32 and len({r.id for r in first}) == 300
    assert {r.tier for r in first} == {"bulk"}


def test_closed_loops_of_several_classes_go_to_their_own_tiers() -> None:
    def loop(service_tier: str) -> dict[str, object]:
        return {
            "role": "interactive",
            "service_tier": service_tier,
            "arrivals": {"streams": 2},
            "prompt_tokens": 8,
            "output_tokens": 4,
        }

    scenario = Scenario.model_validate({"classes": {"one": loop("flex"), "two": loop("default")}})
    loops = scenario_traffic(scenario, make_tiers(), 20, seed=1).loops
    assert [next(loop.requests).tier for loop in loops] == ["bulk", "realtime"]


def test_requests_of_a_scenario_have_the_deadline_that_they_ask_for() -> None:
    traffic = scenario_traffic(load_scenario("deadlines"), make_tiers(), 20, seed=1)
    assert {(r.traffic_class, r.deadline_s) for r in traffic.arrivals} == {("chat", None), ("jobs", 15.0)}


def test_a_closed_loop_of_chats_ends_with_the_load_and_one_of_bulk_does_not() -> None:
    scenario = load_scenario("saturation", bulk_pool="b3-synthesis")
    chats, bulk = scenario_traffic(scenario, make_tiers(), 20, seed=1).loops
    assert (chats.traffic_class, chats.streams, chats.ends_with_load) == ("chat", 32, True)
    assert not bulk.ends_with_load


def test_half_the_rate_is_half_of_the_same_requests() -> None:
    whole, half = (trace(rate, make_rows(200)) for rate in (1.0, 0.5))
    assert [r.at_s for r in whole.arrivals] == [i / 2 for i in range(200)]
    assert 70 <= len(half.arrivals) <= 130
    assert {(r.id, r.at_s) for r in half.arrivals} <= {(r.id, r.at_s) for r in whole.arrivals}


def test_prompts_of_a_trace_share_their_prefix_and_nothing_else() -> None:
    rows = make_rows(4, prefix_id="a", prefix_tokens=8) + make_rows(2, prefix_id="b", prefix_tokens=8)
    traffic = trace(1.0, rows)
    assert traffic.shares_prefixes
    prompts = [r.prompt_token_ids for r in traffic.arrivals]
    assert len({p[:8] for p in prompts}) == 2 and len({p[:9] for p in prompts}) == 6
    assert sorted(map(len, prompts)) == sorted(row.prompt_tokens for row in rows)


def test_turns_of_a_session_begin_with_what_was_said() -> None:
    scenario = load_scenario("w4-agents")
    traffic = scenario_traffic(scenario, make_tiers(), 60, seed=2)
    assert traffic.shares_prefixes
    chats = [r for r in traffic.arrivals if r.traffic_class == "agent"]
    continued = [(a, b) for a in chats for b in chats if a is not b and _continues(a, b)]
    assert continued, "no turn holds the one before"


def _continues(earlier: OfferedRequest, later: OfferedRequest) -> bool:
    said = earlier.prompt_token_ids
    return earlier.at_s < later.at_s and later.prompt_token_ids[: len(said)] == said


def test_names_that_no_tier_has_are_refused() -> None:
    with pytest.raises(TrafficError, match="'gold'"):
        trace(1.0, make_rows(1, tier="gold"))
    with pytest.raises(TrafficError, match="in two tiers"):
        rows = make_rows(1, **{"class": "a"}) + make_rows(1, **{"class": "a", "tier": "flex"})
        trace(1.0, rows)
