"""The gateway process: what it reads from its settings before it serves."""

import json
from pathlib import Path

import pytest

from tidegate.gateway import BadSamplingDefaults, load_sampling_defaults
from tidegate.settings import GatewaySettings


def recommend(directory: Path, temperature: float) -> str:
    (directory / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
    return str(directory)


def test_the_setting_decides_which_sampling_defaults_are_used(tmp_path: Path) -> None:
    model = recommend(tmp_path, 0.5)
    assert load_sampling_defaults(GatewaySettings(model=model)).temperature == 0.5
    assert load_sampling_defaults(GatewaySettings(model=model, sampling_defaults="openai")).temperature == 1.0


def test_a_sampling_default_out_of_range_prevents_the_start(tmp_path: Path) -> None:
    model = recommend(tmp_path, -1)
    with pytest.raises(BadSamplingDefaults, match="generation_config.json: temperature"):
        load_sampling_defaults(GatewaySettings(model=model))
    assert load_sampling_defaults(GatewaySettings(model=model, sampling_defaults="openai")).temperature == 1.0
