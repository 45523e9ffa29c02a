"""`priority` and `x-llm-d-slo-ttft-ms` as ways to ask for a tier."""

from pathlib import Path

import pytest

from gateway.requests.prepare.placement import wished_service_tier
from scheduler.config import TierSet, load_tiers, parse_tiers

SHIPPED = load_tiers(Path(__file__).parents[3] / "tiers.yaml")
FOUR = parse_tiers(
    {
        "default_tier": "usual",
        "batch_tier": "night",
        "tiers": {
            "first": {"priority": 90, "service_tiers": ["priority"], "slo": {"ttft_p99_ms": 200}},
            "usual": {"priority": 50, "service_tiers": ["auto", "default"], "slo": {"ttft_p99_ms": 1000}},
            "cheap": {"priority": 20, "service_tiers": ["flex"]},
            "night": {"priority": 0},
        },
    }
)


def wished(
    service_tier: str | None = None,
    priority: int | None = None,
    header: str | None = None,
    usual: str = "usual",
    tiers: TierSet = FOUR,
) -> str | None:
    return wished_service_tier(service_tier, priority, header, tiers[usual], tiers)


@pytest.mark.parametrize(
    ("priority", "usual", "expected"),
    [
        (1, "usual", "flex"),
        (2**62, "usual", "flex"),  # the tier of batches has no name, so nobody gets it in this way
        (-1, "usual", "priority"),
        (-7, "usual", "priority"),
        (-1, "cheap", "default"),
        (-2, "cheap", "priority"),
        (1, "cheap", None),
        (-1, "first", None),
        (-1, "night", "flex"),
        (0, "usual", None),
    ],
)
def test_priority_moves_down_or_up_by_tiers(priority: int, usual: str, expected: str | None) -> None:
    assert wished(priority=priority, usual=usual) == expected


@pytest.mark.parametrize(
    ("header", "expected"), [("5000", "default"), ("1000", "default"), ("999.5", "priority"), ("5", "priority")]
)
def test_a_ttft_is_served_in_the_lowest_tier_that_promises_it(header: str, expected: str) -> None:
    assert wished(header=header) == expected


def test_what_is_more_explicit_goes_first() -> None:
    assert wished("priority", 1, "5000") == "priority"
    assert wished("auto", 1, "5") == "flex"
    assert wished("auto", 0) == "auto"
    assert wished() is None


def test_the_shipped_tiers() -> None:
    assert wished(priority=1, usual="realtime", tiers=SHIPPED) == "flex"
    assert wished(header="200", usual="realtime", tiers=SHIPPED) == "default"
