"""Nobody is pushed aside: not by another key's flood, by a lower tier, or by long prompts."""

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from loadtest.simulation.command import log_errors_only
from loadtest.simulation.cost_card import load_cost_card
from loadtest.simulation.deployment import Setting
from loadtest.simulation.experiment import find_tiers
from loadtest.simulation.observation import RequestRecord
from loadtest.simulation.run import simulate
from loadtest.simulation.traffic import OfferedRequest, Traffic
from loadtest.traffic.scenario import Scenario
from scheduler.clock import NEVER_S
from scheduler.config import TierSet, parse_tiers
from tests.loadtest.simulation.builders import add, chats, run_scenario, share_in_time

CARD = load_cost_card("135m-cpu")
PROMPTS = {"min": 32, "max": 128}


@pytest.fixture(autouse=True)
def without_log() -> Iterator[None]:
    before = structlog.get_config()
    log_errors_only()
    yield
    structlog.configure(**before)


def traffic(key: str = "", service_tier: str = "default", output_tokens: int = 32, **arrivals: Any) -> dict[str, Any]:
    return {
        "role": "interactive",
        "service_tier": service_tier,
        "key": key,
        "arrivals": arrivals,
        "prompt_tokens": PROMPTS,
        "output_tokens": output_tokens,
    }


def served(
    classes: dict[str, Any],
    name: str = "chat",
    *more: OfferedRequest,
    tiers: TierSet | None = None,
    duration_s: float = 20.0,
) -> list[RequestRecord]:
    """Return the requests of the class `name` beside all others."""
    scenario = Scenario.model_validate({"classes": classes})
    shipped = tiers or find_tiers("")
    observation = run_scenario(scenario, duration_s, tiers=shipped, card=CARD, alter=add(*more), drain_s=5.0)
    return chats(observation, name=name)


def total_s(records: list[RequestRecord]) -> float:
    """Return how long all answers take together."""
    return sum(r.ended_s - r.arrived_s for r in records if r.ended_s is not None)


def median_ttft_s(records: list[RequestRecord]) -> float:
    return sorted(r.ttft_s if r.ttft_s is not None else float("inf") for r in records)[len(records) // 2]


@pytest.mark.parametrize(("streams", "most"), [(100, 2), pytest.param(600, 3, marks=pytest.mark.full)])
def test_another_keys_loops_do_not_push_a_chat_aside(streams: int, most: int) -> None:
    """600 loops also fill the batch and the queue, so that some of their requests are refused."""
    chat = traffic("b", rate_per_s=0.5)
    alone = served({"chat": chat})
    beside = served({"chat": chat, "flood": traffic("a", output_tokens=64, streams=streams)})
    assert share_in_time(beside) >= 0.9
    assert median_ttft_s(beside) <= most * median_ttft_s(alone)


LONG, SHORT = (1500, 3500, 8), (4, 16, 1)  # least and most tokens of a prompt, tokens of an answer


@pytest.mark.parametrize("shape", [LONG, SHORT])
def test_another_keys_flood_makes_answers_no_longer_than_bulk_does(shape: tuple[int, int, int]) -> None:
    """Its first few requests are part of it: four of them made answers 11 times as long, and 3 times if short."""
    chat, (least, most, output_tokens) = traffic("b", rate_per_s=1), shape
    flood = traffic("a", output_tokens=output_tokens, streams=60)
    flood["prompt_tokens"] = {"min": least, "max": most}
    alone, beside = served({"chat": chat}), served({"chat": chat, "flood": flood})
    assert len(beside) == len(alone)
    assert median_ttft_s(beside) <= 1.2 * median_ttft_s(alone)
    assert total_s(beside) <= 1.3 * total_s(alone)


def test_one_request_without_an_end_shares_the_engine_with_another_keys_flood() -> None:
    """Each of its steps costs more than what it computes: if only that counted, it would keep most of the engine."""
    one = traffic("b", output_tokens=300, streams=1)
    flood = traffic("a", streams=6)
    alone, beside = served({"flood": flood}, "flood"), served({"one": one, "flood": flood}, "flood")
    assert len(beside) >= 0.35 * len(alone)
    assert median_ttft_s(beside) <= 3 * median_ttft_s(alone)


def test_two_floods_share_the_engine_by_the_weights_of_their_keys() -> None:
    heavy = traffic("a", output_tokens=64, streams=40) | {"key_weight": 3}
    classes = {"heavy": heavy, "light": traffic("b", output_tokens=64, streams=40)}
    done = {name: sum(r.is_done for r in served(classes, name)) for name in classes}
    assert 2.2 <= done["heavy"] / done["light"] <= 4.0


def test_a_bulk_flood_leaves_a_later_one_its_share() -> None:
    """Alone, the engine serves 290 of them a second: 400 in 1.4 s, and in 2.8 s beside as many others."""

    def jobs(key: str, count: int, at_s: float) -> list[OfferedRequest]:
        return [OfferedRequest(f"{key}{i}", key, "bulk", at_s, (7,) * 100, 50, i, owner=key) for i in range(count)]

    traffic = add(*jobs("a", 3000, 0.0), *jobs("b", 400, 2.0))(Traffic({}, [], (), shares_prefixes=False))
    setting = Setting(find_tiers(""), load_cost_card("8b-h200"))
    records = simulate(setting, traffic, 5.0, drain_s=30.0).requests
    took_s = {key: max(r.ended_s or NEVER_S for r in records if r.traffic_class == key) for key in "ab"}
    assert took_s["b"] - 2.0 <= 2 * 1.4 + 1.5, "and as long as it takes until the first running ones end"
    assert took_s["a"] <= 13.0, "whole work: 11.7 s"


def two_tiers() -> TierSet:
    """Return the recipe of docs/tiers.md for tenants that pay for their latency."""
    document = find_tiers("").document(defaults=False)
    del document["tiers"]["realtime"]
    gold = {"priority": 200, "slo": {"ttft_p99_ms": 300, "itl_p99_ms": 60}, "service_tiers": ["priority"]}
    silver = {"priority": 150, "slo": {"ttft_p99_ms": 1000, "itl_p99_ms": 100}, "service_tiers": ["default"]}
    document["default_tier"] = "silver"
    document["tiers"] |= {"gold": gold, "silver": silver}
    return parse_tiers(document)


def test_a_tier_is_protected_from_a_lower_interactive_one() -> None:
    classes = {"chat": traffic(service_tier="priority", rate_per_s=1), "flood": traffic(output_tokens=64, streams=64)}
    beside = served(classes, tiers=two_tiers())
    assert share_in_time(beside, 0.3) >= 0.95
    assert sum(100 * r.gaps_missed <= r.gaps for r in beside) >= 0.95 * len(beside)


def test_long_prompts_leave_chats_their_time() -> None:
    long = [OfferedRequest(f"long-{i}", "long", "realtime", 2.0, (7,) * 3000, 16, i) for i in range(8)]
    assert share_in_time(served({"chat": traffic(rate_per_s=1)}, "chat", *long)) >= 0.9


def test_bulk_that_comes_at_once_is_shared_among_idle_workers() -> None:
    tiers = find_tiers("")
    jobs = [OfferedRequest(f"job-{i}", "job", "bulk", 1.0, (7,) * 100, 50, i) for i in range(100)]
    nothing = Traffic({}, [], (), shares_prefixes=False)
    observation = simulate(Setting(tiers, CARD, workers=4), add(*jobs)(nothing), 10.0, drain_s=30.0)
    busy_s = [engine.busy_s for engine in observation.engines]
    assert min(busy_s) >= 0.9 * max(busy_s)
