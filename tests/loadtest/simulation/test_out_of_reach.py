"""Targets that no machine of this speed can keep: they cost hardly more than targets that it keeps."""

from statistics import median
from typing import Any

import pytest

from loadtest.simulation.cost_card import load_cost_card
from loadtest.traffic.scenario import load_scenario
from tests.loadtest.simulation.builders import chats, make_scenario, make_tiers, run_scenario, tokens_ended

CARD = load_cost_card("135m-cpu")  # a step takes 10 ms at least, and the prompt of a chat 30 to 60 ms
IN_REACH, OUT_OF_REACH = {"ttft_p99_ms": 500, "itl_p99_ms": 100}, {"ttft_p99_ms": 10, "itl_p99_ms": 10}


def medians_s(slo: dict[str, Any]) -> tuple[float, float]:
    """Return the medians of first tokens and whole answers of short chats at the machine's limit."""
    tiers = make_tiers(realtime={"slo": slo})
    served = chats(run_scenario(load_scenario("short-chats", needed=("interactive",)), 30.0, tiers=tiers, card=CARD))
    ttfts_s = [r.ttft_s for r in served if r.ttft_s is not None]
    return median(ttfts_s), median(r.ended_s - r.arrived_s for r in served if r.ended_s is not None)


def test_chats_at_the_limit_are_answered_as_soon() -> None:
    """Prompts were cut into pieces of a few tokens, and first tokens took 15 times as long."""
    beside_late, alone = medians_s(OUT_OF_REACH), medians_s(IN_REACH)
    assert beside_late[0] <= 1.5 * alone[0]
    assert beside_late[1] <= 1.1 * alone[1]


@pytest.mark.parametrize("slo", [{**IN_REACH, "ttft_p99_ms": 10}, OUT_OF_REACH], ids=["first tokens", "all tokens"])
def test_bulk_keeps_its_share(slo: dict[str, Any]) -> None:
    """Bulk got a third of it, in steps of a few milliseconds, which made no first token be in time."""
    found = []
    for target in (slo, IN_REACH):
        tiers = make_tiers(realtime={"slo": target, "max_slowdown": 1.25})
        observation = run_scenario(make_scenario(1.0, 64), 40.0, tiers=tiers, card=CARD)
        found.append(
            (tokens_ended(observation, "bulk", 10.0, 40.0), median(r.ttft_s or 60.0 for r in chats(observation)))
        )
    (tokens, ttft_s), (usual_tokens, usual_ttft_s) = found
    assert tokens >= 0.7 * usual_tokens
    assert ttft_s <= 1.4 * usual_ttft_s
