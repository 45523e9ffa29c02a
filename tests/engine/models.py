"""Tiny random models in temporary directories, one for each kind of attention that the engine must get right."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PhimoeConfig,
    Qwen3Config,
)

VOCAB_SIZE = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    # None: random models never end, and lengths are then what the test says. Pads: Gemma's embedding of the pad
    # token would be zeroed.
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    # Wide enough for logits to differ, so that an argmax is a statement.
    "initializer_range": 0.4,
}
# A random model whose output is its own embedding repeats its last token for ever, whatever attention does.
_UNTIED = {"tie_word_embeddings": False}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_COMMON, num_key_value_heads=2),
    "llama-mqa-tied": lambda: LlamaConfig(
        **_COMMON, num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True
    ),
    "qwen3": lambda: Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **_COMMON,
        **_UNTIED,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=7,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=1.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON,
        **_UNTIED,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral": lambda: MistralConfig(**_COMMON, num_key_value_heads=2, sliding_window=9),
    "phi": lambda: PhiConfig(**_COMMON, partial_rotary_factor=0.5),
    # Its window is in the mask only, not in what attention is called with.
    "phimoe": lambda: PhimoeConfig(
        **_COMMON, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=7
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=7,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


def save_model(directory: Path, config: Any, poisoned_token: int | None = None) -> Any:
    """Write a random model. The embedding of `poisoned_token` is NaN: whoever uses it gets NaN logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if poisoned_token is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[poisoned_token] = float("nan")
    model.save_pretrained(directory)
    return model.eval()


def generate(model: Any, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What transformers itself generates greedily: the specification."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return tuple(output[0, len(prompt) :].tolist())
