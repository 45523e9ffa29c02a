"""Cost cards: the shipped ones are good, and a bad one is refused with the name of the key."""

import json
from pathlib import Path

import pytest

from loadtest.simulation.cost_card import CostCardError, load_cost_card, shipped_cards
from tests.loadtest.simulation.builders import make_card


def test_the_shipped_cards_load_and_describe_an_engine() -> None:
    assert {"135m-cpu", "fixed-64"} <= set(shipped_cards())
    for name in shipped_cards():
        card = load_cost_card(name)
        assert card.name == name
        info = card.engine_info()
        assert (info.num_blocks, info.block_size, info.suspends_steps) == (
            card.num_blocks,
            card.block_size,
            card.suspends_steps,
        )


def test_a_card_survives_its_own_json(tmp_path: Path) -> None:
    card = make_card(suspends_steps=True, price_per_hour=1.5, num_swap_blocks=3)
    path = tmp_path / "card.json"
    path.write_text(card.model_dump_json(), encoding="utf-8")
    assert load_cost_card(str(path)) == card
    assert card.suspends_steps
    assert "swap" in card.engine_info().preemption_modes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"noise": 2}, "noise: "),
        ({"decode": {"step_s": -1}}, "decode.step_s: "),
        ({"suspends_steps": "some"}, "suspends_steps: "),
        ({"speed": 3}, "speed: Extra inputs"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps({**make_card().model_dump(mode="json"), **change}), encoding="utf-8")
    with pytest.raises(CostCardError, match="card.json: .*" + said):
        load_cost_card(str(path))


def test_a_missing_card_says_which_are_shipped() -> None:
    with pytest.raises(CostCardError, match="135m-cpu"):
        load_cost_card("no-such-card")
