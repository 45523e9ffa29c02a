"""Engines over tiny models. A model is written once per test run; every test builds its own engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.native.execution.torch_engine import TorchEngine
from tests.engine.models import CONFIGS, save_model

ModelDirectory = Callable[[str], tuple[Path, Any]]
MakeEngine = Callable[..., TorchEngine]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    """Return a function that gives the directory and the transformers model of a name in `CONFIGS`."""
    saved: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in saved:
            directory = tmp_path_factory.mktemp(name)
            saved[name] = (directory, save_model(directory, CONFIGS[name]()))
        return saved[name]

    return get


@pytest.fixture
def make_engine(model_directory: ModelDirectory) -> MakeEngine:
    """Return a function that builds an fp32 engine; its blocks have 4 tokens, so that short sequences fill many."""

    def make(name: str = "llama", **changes: Any) -> TorchEngine:
        settings = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_num_seqs": 16, **changes}
        return build_torch_engine(EngineConfig(str(model_directory(name)[0]), **settings))

    return make
