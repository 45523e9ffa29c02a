"""The perplexity that is measured is that of transformers' own forward pass."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bench.engines import perplexity
from engine.config import EngineConfig
from engine.factory import build_torch_engine
from tests.engine.models import CONFIGS, save_model


def test_it_is_that_of_the_model(tmp_path: Path) -> None:
    model = save_model(tmp_path, CONFIGS["llama"]())
    sequences = [tuple((7 * i + k) % 97 for i in range(20)) for k in range(3)]
    engine = build_torch_engine(EngineConfig(str(tmp_path), dtype="float32", kv_cache_bytes=1 << 20))
    with torch.no_grad():
        logits = model(torch.tensor(sequences)).logits[:, :-1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(sequences)[:, 1:].flatten()).exp()
    assert perplexity.perplexity(engine, sequences) == pytest.approx(float(expected), rel=1e-4)


def test_the_text_is_that_of_the_standard_library() -> None:
    found = list(perplexity.texts())
    assert len(found) > 50
    assert all(len(text) > perplexity.SHORTEST for text in found)
