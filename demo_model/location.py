"""Where the trained demo model lies. Knows a path; imports neither torch nor transformers."""

from pathlib import Path


def demo_model_path() -> Path:
    """The directory with config.json, model.safetensors and the tokenizer of the shipped model."""
    return Path(__file__).parent / "weights"
