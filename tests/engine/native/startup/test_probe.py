"""The probe finds a model's layers by running it, and refuses models whose tokens would be wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama as llama

from engine.config import EngineConfig, EngineStartError
from engine.native.model.loader import load_config, load_model
from engine.native.startup.probe import LayerSpec, probe_layers
from tests.engine.models import ARCHITECTURES, CONFIGS

CPU = torch.device("cpu")


def probe(directory: Path, config: Any, dtype: torch.dtype = torch.float32, num_tokens: int = 3) -> list[LayerSpec]:
    config.save_pretrained(directory)
    settings = EngineConfig(str(directory), load_format="dummy", device="cpu")
    hf_config = load_config(settings)
    return probe_layers(load_model(settings, hf_config, dtype, CPU), hf_config, num_tokens, num_rows=2)


def shapes(specs: list[LayerSpec]) -> list[tuple[int, int, int | None]]:
    return [(spec.shape.num_kv_heads, spec.shape.head_dim, spec.window) for spec in specs]


def test_a_step_may_have_more_tokens_than_the_model_has_positions(tmp_path: Path) -> None:
    assert shapes(probe(tmp_path, CONFIGS["gpt2"](), num_tokens=300)) == [(4, 8, None)] * 2


def test_layers_have_the_shapes_and_windows_passed_to_attention(tmp_path: Path) -> None:
    assert shapes(probe(tmp_path, CONFIGS["llama"]())) == [(2, 8, None)] * 2
    assert shapes(probe(tmp_path, CONFIGS["gemma3"]())) == [(2, 8, 7), (2, 8, None)]
    assert shapes(probe(tmp_path, CONFIGS["phimoe"]())) == [(2, 8, 7)] * 2
    assert shapes(probe(tmp_path, ARCHITECTURES["gemma4"]())) == [(2, 8, 7), (1, 16, None)]
    assert shapes(probe(tmp_path, ARCHITECTURES["deepseek-v3"]())) == [(4, 16, None)] * 2  # of keys and values
    assert shapes(probe(tmp_path, ARCHITECTURES["llama4"]())) == [(2, 8, None)] * 2, "the context is its first chunk"


def test_a_window_as_long_as_the_context_counts_as_none(tmp_path: Path) -> None:
    config = CONFIGS["mistral"]()
    for window, seen in ((127, 127), (128, None), (4096, None)):
        config.sliding_window = window
        assert shapes(probe(tmp_path, config)) == [(2, 8, seen)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "phimoe"])
def test_rounding_is_not_mistaken_for_mixing(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert len(probe(tmp_path, CONFIGS[name](), dtype)) == 2


def positions_by_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model that ignores the given positions and numbers the rows of a call itself."""
    return lambda self, x, position_ids: original(self, x, torch.arange(x.shape[1])[None])


def shifted_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model whose MLP reads the previous row, as convolutions and recurrences do."""

    def forward(self: Any, x: Tensor) -> Any:
        return original(self, x + x.roll(1, dims=1))

    return forward


def with_an_unknown_option(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **options: original(self, *args, **options, block_indices=torch.zeros(1))


def failing(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        raise IndexError("\nno such row\nat all")

    return forward


def of_every_other_token(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: original(**options, and_mask_function=lambda b, h, query, key: (query - key) % 2 == 0)


def of_the_future(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: original(**options, or_mask_function=lambda b, h, query, key: (query >= 0) & (key >= 0))


@pytest.mark.parametrize(
    ("place", "name", "change", "message"),
    [
        (llama.LlamaRotaryEmbedding, "forward", positions_by_place, "Llama.* mixes the tokens of a step"),
        (llama.LlamaMLP, "forward", shifted_tokens, "Llama.* mixes the tokens of a step"),
        (llama.LlamaAttention, "forward", with_an_unknown_option, "its attention needs block_indices"),
        (llama.LlamaMLP, "forward", failing, "its forward pass fails on a packed step: no such row \\("),
        (llama, "create_causal_mask", of_every_other_token, "neither causal nor a sliding window"),
        (llama, "create_causal_mask", of_the_future, "not causal"),
    ],
)
def test_a_model_whose_tokens_would_be_wrong_is_refused(
    place: Any,
    name: str,
    change: Callable[..., Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    with pytest.raises(EngineStartError, match=message):
        probe(tmp_path, CONFIGS["llama"]())
