"""The path of the trained demo model. This module imports neither torch nor transformers."""

from pathlib import Path


def demo_model_path() -> Path:
    """Return the directory of the trained model, with config.json, model.safetensors and the tokenizer."""
    return Path(__file__).parent / "weights"
