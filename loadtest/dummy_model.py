"""Writes the config of the reference shape for benchmarks: a Llama of 135 M parameters, without weights.

`tidegate serve --model DIR --load-format dummy` fills it with random weights; the shape is what the published
CPU figures were measured on, so that runs on different machines can be compared.
"""

import json
from pathlib import Path
from typing import Any


def llama_135m_config() -> dict[str, Any]:
    """30 layers, hidden 576, 9 query and 3 KV heads of 64, vocabulary 49152, tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "vocab_size": 49152,
    }


def write_dummy_model(directory: Path) -> Path:
    """Write `config.json` into `directory`, which is made if it is missing; the file's path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(llama_135m_config(), indent=2) + "\n", encoding="utf-8")
    return path
