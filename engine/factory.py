"""Builds the engine that a configuration describes, on what the machine has, and logs what was chosen."""

import ctypes
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
import torch
from torch import nn

from engine.config import EngineConfig, EngineStartError
from engine.interface import Engine, EngineInfo, StepEviction, blocks_for
from engine.native.attention.kernels import AttentionKernels
from engine.native.cpu.build import load_library
from engine.native.cpu.kernels import CpuKernels
from engine.native.cpu.sampler import CpuSampler
from engine.native.device import choose_device, choose_dtype, free_bytes
from engine.native.execution.model_runner import ModelRunner
from engine.native.execution.torch_engine import TorchEngine
from engine.native.kv.cache import KVCache, LayerShape, block_bytes
from engine.native.kv.swap import make_swap_space
from engine.native.model.loader import context_limit, eos_token_ids, is_quantised, load_config, load_model
from engine.native.model.probe import LayerSpec, probe_layers
from engine.native.sampling.sampler import sample
from engine.native.startup.cpu_eviction_trial import can_evict_rows
from engine.native.startup.cpu_optimize import optimize_for_cpu
from engine.native.startup.cuda_bring_up import (
    capture_graphs,
    graph_bytes,
    graph_sizes,
    optimize_for_cuda,
    working_kernels,
)
from engine.native.startup.fusion import is_same_model, trial_logits
from engine.thread import EngineThread

_CPU_SHARE = 0.25  # of the free memory, for KV
_CUDA_SHARE = 0.92  # of what the weights and the largest step leave
_DEFAULT_MAX_MODEL_LEN = 4096  # for a model that names no limit
_BACKENDS = {
    None: "matrix products (decode), SDPA (prefill)",
    "cpu": "own C++ kernels",
    "cuda": "own Triton kernels",
}
_SMALL_MODEL = 10_000_000  # parameters
_GIB = 1 << 30


def build_engine(config: EngineConfig) -> Engine:
    """The engine on a thread of its own. Raises `EngineStartError`."""
    return EngineThread(partial(build_torch_engine, config))


def build_torch_engine(config: EngineConfig) -> TorchEngine:
    """The engine that steps in the caller's thread, as calibration wants it. Raises `EngineStartError`."""
    _check_sizes(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    hf_config = load_config(config)
    wanted_len = _wanted_model_len(config, context_limit(hf_config))
    model = load_model(config, hf_config, dtype, device)
    _set_threads(config, model)
    specs, step_bytes = _measure(model, hf_config, config, device)
    layers = [spec.shape for spec in specs]
    library = load_library() if device.type == "cpu" and config.optimize else None
    kernels = _attention_kernels(config, hf_config, specs, dtype, device, library)
    sizes = graph_sizes(config.max_num_seqs, config.max_step_tokens) if _wants_graphs(config, device, kernels) else []
    for_graphs = graph_bytes(sizes, blocks_for(wanted_len, config.block_size), step_bytes) if sizes else 0
    one_block = block_bytes(layers, config.block_size, dtype)
    num_blocks = _num_blocks(config, wanted_len, one_block, step_bytes + for_graphs, device)
    # Graphs have a block that the pool does not know, to write to where a step has fewer rows than its graph.
    cache = _make_cache(layers, num_blocks + bool(sizes), config.block_size, dtype, device)
    swap = make_swap_space(config, cache, one_block, device)
    info = EngineInfo(
        model_path=config.model,
        max_model_len=_fitting_model_len(config, wanted_len, num_blocks),
        vocab_size=hf_config.get_text_config(decoder=True).vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_step_tokens=config.max_step_tokens,
        eos_token_ids=eos_token_ids(model, hf_config),
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        attention_backend=_BACKENDS[None if kernels is None else device.type],
        preemption_modes=("pause", "swap", "recompute") if swap else ("pause", "recompute"),
        num_swap_blocks=swap.num_blocks if swap else 0,
        swap_block_s=swap.measure() if swap else 0.0,
        steps_ahead=int(device.type == "cuda") if config.steps_ahead is None else config.steps_ahead,
    )
    runner = ModelRunner(model, cache, [spec.window for spec in specs], device, kernels)
    if config.optimize and not is_quantised(model):
        _optimize(model, runner, library, kernels, info, device)
    if sizes and (graphs := capture_graphs(runner, cache, info, sizes, for_graphs, device)) is not None:
        runner.use_graphs(graphs)
    info = replace(info, step_eviction=_step_eviction(model, runner, info, has_graphs=bool(sizes)))
    _log(info, hf_config, one_block)
    sampler = sample if library is None else CpuSampler(library)
    return TorchEngine(info, runner, swap, sampler=sampler, prefix_cache=config.prefix_cache)


def _attention_kernels(
    config: EngineConfig,
    hf_config: Any,
    specs: list[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    library: ctypes.CDLL | None,
) -> AttentionKernels | None:
    """None: torch's operators attend."""
    if device.type == "cuda" and config.optimize:
        num_heads = getattr(hf_config.get_text_config(decoder=True), "num_attention_heads", None)
        return working_kernels(specs, num_heads if isinstance(num_heads, int) else 1, dtype, device)
    return CpuKernels(library, dtype) if library is not None and CpuKernels.supports(dtype) else None


def _optimize(
    model: nn.Module,
    runner: ModelRunner,
    library: ctypes.CDLL | None,
    kernels: AttentionKernels | None,
    info: EngineInfo,
    device: torch.device,
) -> None:
    """Faster layers, and a last look at whether the model is still the same."""
    before = trial_logits(runner, info)
    if device.type == "cpu":
        optimize_for_cpu(model, runner, library, info)
    elif kernels is not None:
        optimize_for_cuda(model, runner, info)
    if not is_same_model(before, trial_logits(runner, info), runner.dtype):
        raise EngineStartError(f"{info.model_path} computes something else with faster layers: use --no-optimize")


def _step_eviction(model: nn.Module, runner: ModelRunner, info: EngineInfo, has_graphs: bool) -> StepEviction:
    """A graph is replayed whole, and behind a step made ahead another one is begun already."""
    if has_graphs or info.steps_ahead:
        return StepEviction.NOTHING
    can_compact_rows = info.device == "cpu" and can_evict_rows(model, runner, info)
    return StepEviction.ROWS if can_compact_rows else StepEviction.STEPS


def _wants_graphs(config: EngineConfig, device: torch.device, kernels: AttentionKernels | None) -> bool:
    return config.cuda_graphs and device.type == "cuda" and kernels is not None


def _check_sizes(config: EngineConfig) -> None:
    for name in ("block_size", "max_num_seqs", "max_step_tokens", "max_model_len", "kv_cache_bytes", "num_threads"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise EngineStartError(f"{name} is {value}: it must be at least 1")


def _set_threads(config: EngineConfig, model: nn.Module) -> None:
    """A small model's operators are too short to share: a second thread makes a demo step 1.2 times as fast and takes
    the core that the gateway needs."""
    small = sum(p.numel() for p in model.parameters()) < _SMALL_MODEL
    if config.num_threads is not None or small:
        torch.set_num_threads(config.num_threads or 1)


def _wanted_model_len(config: EngineConfig, limit: int | None) -> int:
    """What was asked for, if the model can do it, else the model's own limit."""
    if config.max_model_len is None:
        return limit or _DEFAULT_MAX_MODEL_LEN
    if config.max_model_len < 2:
        raise EngineStartError("max_model_len is 1: there is no room for a prompt and a token")
    if limit is not None and config.max_model_len > limit:
        raise EngineStartError(f"max_model_len is {config.max_model_len} and the model's context {limit} tokens")
    return config.max_model_len


def _measure(
    model: nn.Module, hf_config: Any, config: EngineConfig, device: torch.device
) -> tuple[list[LayerSpec], int]:
    """What the layers need, and the bytes that the largest step takes besides weights and KV (CUDA only:
    on a CPU the share of memory that KV does not get is ample)."""
    if device.type == "cpu":
        return probe_layers(model, hf_config, 1, 1, config.max_model_len), 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    num_rows = min(config.max_num_seqs, config.max_step_tokens)
    specs = probe_layers(model, hf_config, config.max_step_tokens, num_rows, config.max_model_len)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return specs, peak


def _num_blocks(config: EngineConfig, model_len: int, one_block: int, step_bytes: int, device: torch.device) -> int:
    """As many as were asked for in bytes; else what is free on CUDA, and on a CPU what `max_num_seqs` full
    sequences take, within a share of what is free."""
    free = free_bytes(device) - step_bytes
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
        if budget > free:
            raise EngineStartError(f"kv_cache_bytes is {budget / _GIB:.1f} GiB and {free / _GIB:.1f} GiB are free")
    elif device.type == "cuda":
        budget = int(_CUDA_SHARE * free)
    else:
        all_full = config.max_num_seqs * blocks_for(model_len, config.block_size) * one_block
        budget = min(all_full, int(_CPU_SHARE * free))
    if budget < one_block:
        raise EngineStartError(f"not enough memory: a KV block takes {one_block} bytes and {budget} are to be had")
    return budget // one_block


def _fitting_model_len(config: EngineConfig, model_len: int, num_blocks: int) -> int:
    """Every sequence must be able to end: none may grow longer than the whole cache."""
    room = num_blocks * config.block_size
    if config.max_model_len is not None and room < model_len:
        raise EngineStartError(f"not enough memory: the KV cache holds {room} tokens and max_model_len is {model_len}")
    if room < 2:
        raise EngineStartError("not enough memory: the KV cache holds a single token")
    return min(model_len, room)


def _make_cache(
    layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    try:
        return KVCache(layers, num_blocks, block_size, dtype, device)
    except (torch.OutOfMemoryError, MemoryError, OSError) as error:
        raise EngineStartError(f"not enough memory for {num_blocks} KV blocks") from error


def _log(info: EngineInfo, hf_config: Any, one_block: int) -> None:
    structlog.get_logger(__name__).info(
        "engine ready",
        model=info.model_path,
        architecture=type(hf_config).__name__.removesuffix("Config"),
        device=info.device,
        dtype=info.dtype,
        attention=info.attention_backend,
        max_model_len=info.max_model_len,
        kv_blocks=info.num_blocks,
        block_size=info.block_size,
        kv_cache_mib=round(info.num_blocks * one_block / (1 << 20)),
        swap_blocks=info.num_swap_blocks,
        cpu_threads=torch.get_num_threads(),
        step_eviction=info.step_eviction.value,
    )
