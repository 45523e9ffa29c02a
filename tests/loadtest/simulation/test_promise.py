"""The promise of `max_slowdown`: beside bulk, whole answers take that many times as long as alone."""

import math
import random
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from engine.step_time.cost import StepCost
from loadtest.simulation.cost_card import CostCard, load_cost_card
from loadtest.simulation.observation import RequestRecord
from loadtest.traffic.scenario import Scenario
from tests.loadtest.simulation.builders import chats, make_card, make_tiers, run_scenario
from tests.marks import mostly_full

LINEAR = {"step_s": 0.006, "prefill_token_s": 4e-4, "attend_s": 1e-8, "context_token_s": 1e-6, "decode_s": 8e-4}
GPU = {"step_s": 0.0095, "prefill_token_s": 4e-5, "attend_s": 1e-10, "context_token_s": 2e-8, "decode_s": 2e-5}


@dataclass(frozen=True, slots=True)
class ConcaveCost(StepCost):
    """The cost of a CPU, on which four rows take hardly longer than one: 12, 21 and 34 ms with 1, 8 and 32 rows."""

    def step(self, work_s: float) -> float:
        return self.step_s + 0.0057 * (1000 * work_s) ** 0.457


class ConcaveCard(CostCard):
    def step_cost(self, mixed: bool) -> StepCost:
        return ConcaveCost(**self.decode.model_dump())


ROWS = {"step_s": 0.0063, "prefill_token_s": 1e-3, "attend_s": 1e-8, "context_token_s": 1e-6, "decode_s": 1e-3}
CARDS = {
    "linear": make_card(decode=LINEAR, mixed=LINEAR, num_blocks=20_000),
    "gpu": make_card(decode=GPU, mixed={**GPU, "step_s": 0.0105}, num_blocks=20_000, suspends_steps=False),
    "h200": load_cost_card("8b-h200"),
    "concave": ConcaveCard.model_validate(make_card(decode=ROWS, mixed=ROWS, num_blocks=20_000).model_dump()),
}
CHAT = {
    "role": "interactive",
    "service_tier": "default",
    "arrivals": {"rate_per_s": 2},
    "prompt_tokens": {"min": 32, "max": 128},
    "output_tokens": 32,
}
BULK = {
    "role": "bulk",
    "service_tier": "flex",
    "arrivals": {"streams": 64},
    "prompt_tokens": {"min": 64, "max": 192},
    "output_tokens": {"min": 32, "max": 96},
}


def answers(
    card: CostCard, slowdown: float, seed: int, duration_s: float, chat: object = CHAT, **bulk: object
) -> dict[str, RequestRecord]:
    scenario = Scenario.model_validate({"classes": {"chat": chat, **bulk}})
    tiers = make_tiers(realtime={"max_slowdown": slowdown}, bulk={"batch_size": {"min": 1, "start": 64, "max": 64}})
    observation = run_scenario(scenario, duration_s, tiers=tiers, card=card, seed=seed)
    return {record.id: record for record in chats(observation)}


def measured(
    card: CostCard, slowdown: float, seed: int, duration_s: float, chat: object = CHAT, bulk: object = BULK
) -> float:
    """Return how many times as long the chats take beside bulk as alone, all together."""
    alone = answers(card, slowdown, seed, duration_s, chat)
    beside = answers(card, slowdown, seed, duration_s, chat, bulk=bulk)
    assert alone.keys() == beside.keys()
    times_s = [[r.ended_s - r.arrived_s for r in of.values() if r.ended_s is not None] for of in (beside, alone)]
    return sum(times_s[0]) / sum(times_s[1])


@pytest.mark.parametrize("card", ["linear", "gpu"])
def test_answers_take_as_long_as_promised(card: str) -> None:
    assert measured(CARDS[card], 1.25, seed=1, duration_s=30) == pytest.approx(1.25, abs=0.1)


def test_many_chats_leave_bulk_what_they_promise() -> None:
    """At a GPU's costs, and in nearly each step a chat that has just come: it has earned no delay yet."""
    chat = {**CHAT, "arrivals": {"rate_per_s": 80}}
    assert 1.15 <= measured(CARDS["gpu"], 1.25, seed=1, duration_s=6, chat=chat) <= 1.3


@pytest.mark.timeout(600)  # computes for half a minute, and longer beside others
@pytest.mark.parametrize(
    ("card", "slowdown", "seed"), mostly_full(product(CARDS, (1.05, 1.25, 1.5), (1, 2, 3)), ("concave", 1.05, 2))
)
def test_answers_take_as_long_as_promised_whatever_the_promise(card: str, slowdown: float, seed: int) -> None:
    assert measured(CARDS[card], slowdown, seed, duration_s=60) == pytest.approx(slowdown, abs=0.1)


def load_of(card: CostCard, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return chats that take 15 to 60 % of the engine's time alone, and bulk, both of any lengths."""

    def span(least: float, most: float) -> dict[str, int]:
        low = math.exp(rng.uniform(math.log(least), math.log(most)))
        return {"min": int(low), "max": int(low * rng.uniform(1.2, 4)) + 1}

    prompts, outputs = span(16, 400), span(6, 100)
    cost, prompt = card.step_cost(False), prompts["max"] // 2
    alone_s = card.step_cost(True).step(cost.prefill(prompt, 0)) + outputs["max"] * cost.step(cost.decode(prompt))
    rate = {"rate_per_s": rng.uniform(0.15, 0.6) / alone_s, "cv": rng.choice((1.0, 2.0))}
    chat = {**CHAT, "arrivals": rate, "prompt_tokens": prompts, "output_tokens": outputs}
    streams = rng.randint(8, 128)
    return chat, {
        **BULK,
        "arrivals": {"streams": streams},
        "prompt_tokens": span(16, 400),
        "output_tokens": span(4, 100),
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("card", "seed"), mostly_full(product(CARDS, range(4)), ("linear", 2), ("linear", 3), ("concave", 1))
)
def test_no_load_makes_answers_take_longer_than_promised(card: str, seed: int) -> None:
    """Bulk may be too little to use what is promised, so there is no lower bound."""
    rng = random.Random(f"{card} {seed}")
    slowdown = rng.choice((1.05, 1.25, 1.5, 2.0))
    chat, bulk = load_of(CARDS[card], rng)
    duration_s = min(150.0, max(40.0, 30 / chat["arrivals"]["rate_per_s"]))
    assert measured(CARDS[card], slowdown, seed, duration_s, chat, bulk) <= slowdown + 0.1


@pytest.mark.full
def test_first_tokens_wait_for_half_of_a_short_step_where_nothing_can_be_evicted() -> None:
    """At a GPU's costs, where a first token takes 15 ms alone, and a step at least 10 ms."""

    def first_tokens_s(**bulk: Any) -> list[float]:
        of_seeds = [answers(CARDS["gpu"], 1.25, seed, 60, **bulk) for seed in (1, 2, 3)]
        return sorted(r.ttft_s for of in of_seeds for r in of.values() if r.ttft_s is not None)

    beside, alone = first_tokens_s(bulk=BULK), first_tokens_s()
    for share in (0.5, 0.95):
        assert beside[int(share * len(beside))] <= 1.5 * alone[int(share * len(alone))]
