"""A tiny encoder and a tiny reranker, written once per test run."""

from pathlib import Path

import pytest

from tests.encoders import save_encoder, save_reranker


@pytest.fixture(scope="session")
def encoder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def reranker_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reranker(tmp_path_factory.mktemp("reranker"))
