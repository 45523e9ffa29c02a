"""Computes the number of KV blocks of an engine, and the longest sequence that these blocks allow.

Knows bytes, blocks and the configuration; does not know the model or the tensors (`KVCache`).
"""

import torch

from engine.config import EngineConfig, EngineStartError
from engine.interface import blocks_for
from engine.native.device import free_bytes

_DEFAULT_MAX_MODEL_LEN = 4096  # tokens; for a model that declares no limit
_CPU_SHARE = 0.25  # share of the free memory that is used for KV
_CUDA_SHARE = 0.92  # share for KV of the memory that the weights and the largest step leave free
_GIB = 1 << 30


def check_kv_cache_dtype(config: EngineConfig, device: torch.device) -> None:
    """Raises `EngineStartError` if the engine would not use the configured dtype of the KV cache on `device`."""
    if config.kv_cache_dtype == "fp8" and device.type == "cpu" and config.optimize:
        raise EngineStartError(
            "--kv-cache-dtype fp8 has no kernels on a CPU: leave it out, or let torch's operators compute it, which is "
            "slower (--no-optimize)"
        )


def wanted_model_len(config: EngineConfig, limit: int | None) -> int:
    """Return the configured `max_model_len`, or the model's own `limit` in tokens if no length is configured.

    Raises `EngineStartError` if the configured length is below 2 or above the limit.
    """
    if config.max_model_len is None:
        return limit or _DEFAULT_MAX_MODEL_LEN
    if config.max_model_len < 2:
        raise EngineStartError("max_model_len is 1: there is no room for a prompt and a token")
    if limit is not None and config.max_model_len > limit:
        raise EngineStartError(f"max_model_len is {config.max_model_len} and the model's context {limit} tokens")
    return config.max_model_len


def num_kv_blocks(
    config: EngineConfig, model_len: int, block_bytes: int, reserved_bytes: int, device: torch.device
) -> int:
    """Return the number of KV blocks, of `block_bytes` each.

    `reserved_bytes` of the free memory are left for steps. If `kv_cache_bytes` is configured, it is the size of the KV
    cache. Otherwise a GPU uses most of its free memory for KV. A CPU uses the memory that `max_num_seqs` sequences of
    full length need, but at most a share of its free memory. Raises `EngineStartError` if the configured size is not
    free, or if the memory for KV is less than one block.
    """
    free = free_bytes(device) - reserved_bytes
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
        if budget > free:
            raise EngineStartError(f"kv_cache_bytes is {budget / _GIB:.1f} GiB and {free / _GIB:.1f} GiB are free")
    elif device.type == "cuda":
        budget = int(_CUDA_SHARE * free)
    else:
        all_full = config.max_num_seqs * blocks_for(model_len, config.block_size) * block_bytes
        budget = min(all_full, int(_CPU_SHARE * free))
    if budget < block_bytes:
        raise EngineStartError(f"not enough memory: a KV block takes {block_bytes} bytes and {budget} are available")
    return budget // block_bytes


def fitting_model_len(config: EngineConfig, model_len: int, num_blocks: int) -> int:
    """Return the maximum sequence length: `model_len`, or the number of tokens that the KV cache holds if that is less.

    A sequence that does not fit into the KV cache could never finish. Raises `EngineStartError` if the configured
    length, or two tokens, do not fit.
    """
    room = num_blocks * config.block_size
    if config.max_model_len is not None and room < model_len:
        raise EngineStartError(f"not enough memory: the KV cache holds {room} tokens and max_model_len is {model_len}")
    if room < 2:
        raise EngineStartError("not enough memory: the KV cache holds a single token")
    return min(model_len, room)
