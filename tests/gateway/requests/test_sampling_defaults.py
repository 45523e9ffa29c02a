"""The model's recommended sampling parameters hold for requests that do not set them."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.requests.tokens.model_files import SamplingDefaults, read_sampling_defaults
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL


def write(directory: Path, declared: Any) -> str:
    (directory / "generation_config.json").write_text(json.dumps(declared))
    return str(directory)


def test_without_a_recommendation_openais_defaults_hold(tmp_path: Path) -> None:
    openai = SamplingDefaults()
    assert read_sampling_defaults(str(tmp_path)) == openai
    assert read_sampling_defaults(write(tmp_path, {"eos_token_id": [1, 2], "do_sample": False})) == openai
    assert (openai.temperature, openai.top_p, openai.top_k, openai.repetition_penalty) == (1.0, 1.0, 0, 1.0)


@pytest.mark.parametrize(
    "declared", [{"temperature": "hot"}, {"top_p": 1.5}, {"repetition_penalty": 0}, {"temperature": float("nan")}, [3]]
)
def test_a_wrong_value_is_refused_by_name(declared: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="generation_config.json") as caught:
        read_sampling_defaults(write(tmp_path, declared))
    assert "\n" not in str(caught.value)


async def test_a_request_without_parameters_is_sampled_as_the_model_recommends() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
    async with running_stand(defaults=defaults) as stand:
        await stand.client.completions.create(model=MODEL, prompt="hi")
        sampling = stand.worker.served[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)
