"""The engine that a configuration gives, and the one-sentence error if it cannot start."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_engine, build_torch_engine
from engine.interface import Run, StepPlan
from engine.native.device import choose_device, choose_dtype
from engine.native.startup.loading import dtype_of
from tests.engine.conftest import MakeEngine
from tests.engine.drive import drive, make_new
from tests.engine.models import CONFIGS
from tests.engine.native.cpu.compiled import library_with_products


def write_config(directory: Path, config: Any) -> str:
    config.save_pretrained(directory)
    return str(directory)


def make_config(model: str, **changes: Any) -> EngineConfig:
    return EngineConfig(model, **{"load_format": "dummy", "device": "cpu", "max_num_seqs": 4, **changes})


def refusal(config: EngineConfig) -> str:
    """Return the one-line message of the `EngineStartError` that building the engine raises."""
    with pytest.raises(EngineStartError) as caught:
        build_torch_engine(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_info_says_what_was_built(make_engine: MakeEngine) -> None:
    info = make_engine("llama", max_model_len=64, max_step_tokens=33).info
    assert (info.max_model_len, info.vocab_size, info.block_size, info.max_step_tokens) == (64, 97, 4, 33)
    assert info.num_blocks == 16 * 64 // 4  # max_num_seqs sequences at full length
    assert (info.device, info.dtype, info.num_layers) == ("cpu", "float32", CONFIGS["llama"]().num_hidden_layers)
    assert info.preemption_modes == ("pause", "recompute")
    assert info.eos_token_ids == ()


def test_the_models_context_is_the_default(make_engine: MakeEngine) -> None:
    assert make_engine("llama").info.max_model_len == 128
    assert make_engine("gpt2").info.max_model_len == 128


def test_dummy_weights_need_only_a_config_and_are_the_same_for_a_seed(tmp_path: Path) -> None:
    model = write_config(tmp_path, CONFIGS["llama"]())
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    state = torch.random.get_rng_state()
    outputs = [
        drive(build_torch_engine(make_config(model, seed=seed)), [make_new("a", range(1, 9))])["a"].output
        for seed in (1, 1, 2)
    ]
    assert outputs[0] == outputs[1] != outputs[2]
    assert torch.equal(state, torch.random.get_rng_state())


async def test_build_engine_serves_through_the_protocol(tmp_path: Path) -> None:
    engine = build_engine(make_config(write_config(tmp_path, CONFIGS["llama"]())))
    try:
        engine.submit(StepPlan(1, start=(make_new("a", [1, 2, 3]),), run=(Run("a", 3),)))
        (output,) = (await engine.collect()).outputs
        assert (output.num_computed_tokens, len(output.token_ids)) == (3, 1)
    finally:
        engine.close()


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in refusal(make_config(str(tmp_path / "none")))
    assert "does not exist" in refusal(make_config("./no/such/model"))
    assert "no config.json" in refusal(make_config(str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    assert str(tmp_path) in refusal(make_config(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-thing"}))
    assert "no-such-thing" in refusal(make_config(str(tmp_path)))


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
# By architecture: its settings, and the reason.
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    # known from the configuration
    "Bamba": ({}, "linear_attention"),
    "Bart": ({}, "encoder"),
    "Bloom": ({}, "AttentionInterface"),
    "DeepseekV32": ({}, "indexed_attention"),
    "Lfm2": ({"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "conv"),
    "MossTranscribeDiarize": ({}, "takes no position_ids"),
    "Qwen2VL": ({}, "no causal language model"),
    "Zamba2": ({}, "hybrid"),
    # known from the probe of its attention
    "Bert": (SMALL, "not causal"),
    "DiffLlama": (SMALL, "more than one attention per layer"),
    "Doge": (SMALL, "biases of its own"),
    "Moshi": (
        {**SMALL, "audio_vocab_size": 8, "sliding_window": 7, "num_key_value_heads": 4},
        "show more than the 7 tokens that its cache keeps",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_architecture_is_refused_by_name(name: str, tmp_path: Path) -> None:
    settings, reason = UNSUPPORTED[name]
    message = refusal(make_config(write_config(tmp_path, getattr(transformers, f"{name}Config")(**settings))))
    assert f"architecture {name}" in message
    assert reason in message
    assert message.endswith("(--engine vllm may run it, or --engine openai before another server that does)")


def test_a_window_that_only_the_cache_applies_limits_the_context(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.sliding_window = 32  # transformers' cache applies it to a Llama, though no mask does
    model = write_config(tmp_path, config)
    assert "set max_model_len to 32" in refusal(make_config(model))
    assert build_torch_engine(make_config(model, max_model_len=32)).info.max_model_len == 32


def test_too_little_memory(tmp_path: Path) -> None:
    model = write_config(tmp_path, CONFIGS["llama"]())
    assert "not enough memory" in refusal(make_config(model, kv_cache_bytes=100))
    assert "not enough memory" in refusal(make_config(model, kv_cache_bytes=4096, max_model_len=128))
    assert "kv_cache_bytes" in refusal(make_config(model, kv_cache_bytes=1 << 50))
    huge = transformers.LlamaConfig(
        hidden_size=65536, intermediate_size=262144, num_hidden_layers=100, num_attention_heads=512
    )
    assert "not enough memory: the weights take" in refusal(make_config(write_config(tmp_path, huge)))


def test_impossible_sizes(tmp_path: Path) -> None:
    model = write_config(tmp_path, CONFIGS["llama"]())
    assert "context 128 tokens" in refusal(make_config(model, max_model_len=129))
    assert "no room" in refusal(make_config(model, max_model_len=1))
    assert "max_step_tokens is 0" in refusal(make_config(model, max_step_tokens=0))
    assert "max_model_len is -5" in refusal(make_config(model, max_model_len=-5))
    assert "--engine vllm" in refusal(make_config(model, adapters=(("mine", "/adapters/mine"),)))


def test_positions_that_would_depend_on_other_sequences_are_not_allowed(tmp_path: Path) -> None:
    """Such a model rotates all positions by other angles if one sequence of the step is long."""
    config = CONFIGS["llama"]()
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 48,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    engine = build_torch_engine(make_config(write_config(tmp_path, config)))
    assert engine.info.max_model_len == 48


def test_weights_are_bfloat16_where_the_kernels_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library_with_products()
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # such as of a processor without instructions for it
    cpu, config = torch.device("cpu"), EngineConfig("model", device="cpu")
    assert dtype_of(config, cpu) is torch.bfloat16
    assert dtype_of(replace(config, optimize=False), cpu) is torch.float32
    assert dtype_of(replace(config, dtype="float32"), cpu) is torch.float32


def test_devices_and_number_formats() -> None:
    cpu = torch.device("cpu")
    assert choose_device("cpu") == cpu
    assert choose_dtype("float16", cpu) is torch.float16
    assert choose_dtype("auto", cpu) in (torch.bfloat16, torch.float32)
    for device in ("abacus", "mps", "cuda:99"):
        with pytest.raises(EngineStartError, match=device):
            choose_device(device)
    with pytest.raises(EngineStartError, match="int3"):
        choose_dtype("int3", cpu)
