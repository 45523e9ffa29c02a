"""Which models are likely to be faster on vLLM's executor: what `tidegate doctor` says on a GPU."""

from typing import Any

import pytest
from transformers import AutoConfig

from engine.native.startup.checkup import reason_for_vllm

SMALL, LARGE = 16 * 10**9, 28 * 10**9


@pytest.mark.parametrize(
    ("model_type", "changes", "weights", "said"),
    [
        ("llama", {}, SMALL, ""),
        ("llama", {}, None, ""),
        ("llama", {}, LARGE, "28 GB"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, SMALL, "quantised"),
        ("mixtral", {}, SMALL, "experts"),
        ("qwen3_moe", {}, SMALL, "experts"),
        ("gemma3", {}, SMALL, ""),  # its text model has a config of its own
    ],
)
def test_large_quantised_and_mixed_models_are_for_vllm(
    model_type: str, changes: dict[str, Any], weights: int | None, said: str
) -> None:
    reason = reason_for_vllm(AutoConfig.for_model(model_type, **changes), weights)
    assert said in reason and bool(reason) == bool(said)
