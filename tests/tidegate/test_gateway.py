"""What the gateway process takes from its settings before it serves."""

import json
from pathlib import Path

import pytest

from tidegate.gateway import BadSamplingDefaults, load_sampling_defaults
from tidegate.settings import GatewaySettings


def recommend(directory: Path, temperature: float) -> str:
    (directory / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
    return str(directory)


def test_the_setting_decides_whose_sampling_defaults_hold(tmp_path: Path) -> None:
    model = recommend(tmp_path, 0.5)
    assert load_sampling_defaults(GatewaySettings(model=model)).temperature == 0.5
    assert load_sampling_defaults(GatewaySettings(model=model, sampling_defaults="openai")).temperature == 1.0


def test_a_recommendation_out_of_range_ends_the_start(tmp_path: Path) -> None:
    model = recommend(tmp_path, -1)
    with pytest.raises(BadSamplingDefaults, match="generation_config.json: temperature"):
        load_sampling_defaults(GatewaySettings(model=model))
    assert load_sampling_defaults(GatewaySettings(model=model, sampling_defaults="openai")).temperature == 1.0
