"""The path of the trained demo model. Imports neither torch nor transformers."""

from pathlib import Path


def demo_model_path() -> Path:
    """Return the directory with config.json, model.safetensors and the tokenizer of the shipped model."""
    return Path(__file__).parent / "weights"
