"""Model directories for measurements: Llama models of a named shape with random weights.

The published CPU figures were measured on the shape of 135 M parameters, so that runs on different machines can be
compared. Knows config.json files and where they are kept. `loadtest.random_weights` makes the weights in a separate
process, because that needs torch.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.machine import python_environment

# The reference shape: 30 layers, hidden size 576, 9 query heads and 3 KV heads of size 64, tied embeddings.
_LLAMA_135M: Mapping[str, Any] = {
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
# By name: hidden size, intermediate size, layers, heads, KV heads, head size, vocabulary, tied embeddings.
_SIZES: Mapping[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "tiny": (128, 256, 2, 4, 2, 32, 512, True),
    "30m": (384, 1024, 10, 6, 2, 64, 32000, True),
    "135m": (576, 1536, 30, 9, 3, 64, 49152, True),
    "360m": (960, 2560, 32, 15, 5, 64, 49152, True),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
}
SHAPE_NAMES = tuple(_SIZES)
WEIGHTS_TIMEOUT_S = 900.0  # the 8b shape takes minutes on a CPU


class ShapeError(Exception):
    """The model to measure does not exist and cannot be made. The message is one sentence."""


def shape_config(name: str, max_position_embeddings: int = 8192) -> dict[str, Any]:
    """Return the content of config.json for the shape `name`. Raises `ShapeError` for an unknown name."""
    if name not in _SIZES:
        raise ShapeError(f"there is no shape {name!r}: {', '.join(SHAPE_NAMES)} are known")
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, is_tied = _SIZES[name]
    return {
        **_LLAMA_135M,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": round(hidden**-0.5, 6),
    }


def write_dummy_model(directory: Path) -> Path:
    """Write the `config.json` of the reference shape of 135 M parameters. Return the path of the file.

    `tidegate serve --model DIR --load-format dummy` serves this shape with random weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(_LLAMA_135M, indent=2) + "\n", encoding="utf-8")
    return path


def write_shape(directory: Path, name: str, max_position_embeddings: int = 8192) -> Path:
    """Write the `config.json` of a shape, for an engine that creates random weights itself. Return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(shape_config(name, max_position_embeddings), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    return directory


def shape_with_weights(name: str, dtype: str, device: str, seed: int, cache: Path | None = None) -> Path:
    """Return the directory of a shape with random weights on disk.

    The first call makes the directory; later calls reuse it. Raises `ShapeError`.
    """
    directory = (cache or Path(tempfile.gettempdir()) / "tidegate-shapes") / f"{name}-{dtype}-{seed}"
    complete = directory / "complete"
    if complete.exists():
        return directory
    write_shape(directory, name)
    command = [sys.executable, "-m", "loadtest.random_weights", "--model", str(directory)]
    command += ["--dtype", dtype, "--device", device, "--seed", str(seed)]
    environment = python_environment(os.cpu_count() or 1)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=WEIGHTS_TIMEOUT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ShapeError(f"the weights of {name} were not made within {WEIGHTS_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise ShapeError(f"the weights of {name} could not be made: {done.stderr.strip()[-300:]}")
    complete.touch()
    return directory


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return the content of `config.json`. Raises `ShapeError` if it cannot be read."""
    try:
        config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShapeError(f"{model_dir} is no model directory: {error}") from error
    return config
