"""Loads on which one rule of the planner could leave work out for good: each is a minute or less of virtual time."""

import pytest

from loadtest.simulation.cost_card import CostCard, load_cost_card
from loadtest.simulation.observation import Observation
from loadtest.traffic.scenario import Scenario
from tests.loadtest.simulation.builders import chats, make_card, make_tiers, run_scenario, share_in_time, tokens_ended
from tests.loadtest.simulation.test_promise import GPU

COSTS = {"step_s": 0.006, "prefill_token_s": 4e-4, "attend_s": 1e-8, "context_token_s": 1e-6, "decode_s": 8e-4}


def traffic(
    role: str, arrivals: dict[str, float], prompt: tuple[int, int], output: tuple[int, int]
) -> dict[str, object]:
    return {
        "role": role,
        "service_tier": "default" if role == "interactive" else "flex",
        "arrivals": arrivals,
        "prompt_tokens": {"min": prompt[0], "max": prompt[1]},
        "output_tokens": {"min": output[0], "max": output[1]},
    }


def play(
    card: CostCard,
    duration_s: float,
    of_bulk: dict[str, object] | None = None,
    *,
    seed: int = 1,
    **classes: dict[str, object],
) -> Observation:
    """Play interactive `classes` beside bulk traffic; `of_bulk` are keys of its tier."""
    tiers = make_tiers(realtime={"max_slowdown": 1.25}, bulk=of_bulk or {})
    return run_scenario(Scenario.model_validate({"classes": classes}), duration_s, tiers=tiers, card=card, seed=seed)


def test_bulk_decodes_behind_long_contexts_beside_a_chat_that_never_ends() -> None:
    """A decode takes 15 ms, nine times what bulk may add to one step. Its chunks must not take what it waits for."""
    costs = {**COSTS, "context_token_s": 5e-6, "prefill_token_s": 1e-4}
    card = make_card(decode=costs, mixed=costs, num_blocks=8000)
    chat = traffic("interactive", {"streams": 1}, (32, 128), (200, 200))
    bulk = traffic("bulk", {"streams": 8}, (2000, 3500), (16, 16))
    observation = play(card, 20, chat=chat, bulk=bulk)
    assert tokens_ended(observation, "bulk", 0, 20) >= 100
    assert share_in_time(chats(observation)) == 1.0


def test_long_prompts_of_bulk_end_one_after_another_beside_chats_that_never_end() -> None:
    """A chunk behind 2,000 tokens takes 21 ms, and bulk may add a tenth of that to a step. If other prompts took what
    it waits for, all would grow alike, and none would end within two minutes."""
    chat = traffic("interactive", {"streams": 2}, (32, 128), (200, 300))
    bulk = traffic("bulk", {"streams": 12}, (2500, 3000), (4, 4))
    observation = play(load_cost_card("135m-cpu"), 60, {"floor": 0.0}, chat=chat, bulk=bulk)
    assert tokens_ended(observation, "bulk", 0, 60) >= 8
    assert share_in_time(chats(observation)) == 1.0


def test_bulk_alone_fills_scarce_blocks_and_computes_hardly_anything_twice() -> None:
    """A GPU's decodes cost little, so that each sequence less is so much less in a second."""
    card = make_card(decode=GPU, mixed=GPU, num_blocks=1000, max_model_len=2048, suspends_steps=False)
    bulk = {"bulk": traffic("bulk", {"streams": 48}, (300, 1500), (50, 400))}
    pinned = {"pinned": {"batch_size": 64}, "batch_size": {"min": 1, "start": 64, "max": 64}}
    unlimited = run_scenario(
        Scenario.model_validate({"classes": bulk}),
        20,
        tiers=make_tiers({"feed_forward": False, "suspend": False}, bulk=pinned),
        card=card,
    )
    ours = play(card, 20, {"batch_size": pinned["batch_size"]}, **bulk)
    assert ours.tokens["bulk"] >= 0.94 * unlimited.tokens["bulk"]
    assert ours.engines[0].lost_tokens <= 0.01 * ours.engines[0].planned_tokens


@pytest.mark.full
def test_bulk_that_may_not_be_preempted_gives_its_blocks_back_soon() -> None:
    """Long prompts wait for the blocks that it holds, beside a chat that decodes all the time. Eight loads together."""
    card = make_card(decode=COSTS, mixed=COSTS, num_blocks=90, max_model_len=1600)
    chat = traffic("interactive", {"streams": 1}, (16, 16), (100, 100))
    long = traffic("interactive", {"rate_per_s": 0.3}, (500, 700), (16, 16))
    bulk = traffic("bulk", {"streams": 3}, (200, 300), (300, 400))
    of_bulk = {"retry": {"max_preemptions": 1}, "batch_size": {"min": 1, "start": 64, "max": 64}}
    played = [play(card, 60, of_bulk, seed=seed, chat=chat, long=long, bulk=bulk) for seed in range(1, 9)]
    assert share_in_time([record for each in played for record in chats(each, name="long")]) >= 0.9
    assert share_in_time([record for each in played for record in chats(each)]) >= 0.99
