"""The size of the KV cache: configured, from free memory, and what it means for the longest sequence."""

import pytest
import torch

from engine.config import EngineConfig, EngineStartError
from engine.native.kv import sizing
from engine.native.kv.sizing import fitting_model_len, num_kv_blocks, wanted_model_len

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = EngineConfig("m", block_size=16, max_num_seqs=4)
LIMITED = EngineConfig("m", max_model_len=64)


@pytest.fixture(autouse=True)
def _free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 1_000_000)


def test_a_cpu_gets_blocks_for_full_sequences_within_a_share_of_its_memory() -> None:
    assert num_kv_blocks(CONFIG, 100, block_bytes=1000, reserved_bytes=0, device=CPU) == 4 * 7
    assert num_kv_blocks(CONFIG, 10_000, block_bytes=1000, reserved_bytes=0, device=CPU) == 250


def test_a_gpu_gets_most_of_the_memory_that_steps_leave() -> None:
    assert num_kv_blocks(CONFIG, 100, block_bytes=1000, reserved_bytes=500_000, device=CUDA) == 460


def test_configured_bytes_decide_if_they_are_free() -> None:
    config = EngineConfig("m", kv_cache_bytes=9999)
    assert num_kv_blocks(config, 100, block_bytes=1000, reserved_bytes=0, device=CPU) == 9
    with pytest.raises(EngineStartError, match="kv_cache_bytes"):
        num_kv_blocks(config, 100, block_bytes=1000, reserved_bytes=995_000, device=CPU)
    with pytest.raises(EngineStartError, match="not enough memory"):
        num_kv_blocks(config, 100, block_bytes=10_000, reserved_bytes=0, device=CPU)


def test_a_small_cache_shortens_the_default_length_and_refuses_a_configured_one() -> None:
    assert fitting_model_len(CONFIG, 100, num_blocks=3) == 48
    assert fitting_model_len(LIMITED, 64, num_blocks=4) == 64
    with pytest.raises(EngineStartError, match="max_model_len is 64"):
        fitting_model_len(LIMITED, 64, num_blocks=3)


def test_the_models_limit_is_the_default_and_the_maximum() -> None:
    assert wanted_model_len(CONFIG, limit=32) == 32
    assert wanted_model_len(CONFIG, limit=None) == 4096
    assert wanted_model_len(LIMITED, limit=None) == wanted_model_len(LIMITED, limit=64) == 64
    with pytest.raises(EngineStartError, match="context 32 tokens"):
        wanted_model_len(LIMITED, limit=32)
