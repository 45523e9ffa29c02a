"""Builds the native engine that a configuration describes, for the hardware of this machine, and logs the choices made.

These are the steps, in order:

1. Load the model.
2. Choose kernels.
3. Divide the memory.
4. Describe the engine (`EngineInfo`).
5. Replace layers by faster ones, after a trial has shown that the results stay the same, and capture graphs.
"""

import ctypes
from dataclasses import dataclass, replace

import structlog
import torch

from engine.config import EngineConfig, EngineStartError
from engine.interface import EngineInfo, blocks_for
from engine.native.attention.kernels import AttentionKernels
from engine.native.cpu.build import load_library
from engine.native.cpu.kernels import CpuKernels
from engine.native.cpu.sampler import CpuSampler
from engine.native.cuda.graph_sizes import GraphSize, graph_sizes
from engine.native.device import choose_device
from engine.native.execution.model_runner import ModelRunner
from engine.native.execution.torch_engine import TorchEngine
from engine.native.kv.cache import KVCache, block_bytes
from engine.native.kv.sizing import check_kv_cache_dtype, fitting_model_len, num_kv_blocks
from engine.native.kv.swap import SwapSpace, make_swap_space
from engine.native.model.loader import eos_token_ids, is_quantised
from engine.native.startup.cpu_optimize import optimize_for_cpu
from engine.native.startup.cuda_bring_up import (
    capture_graphs,
    graph_bytes,
    kernels_or_fault,
    optimize_for_cuda,
    working_kernels,
    working_sampler,
)
from engine.native.startup.exactness import keep_exact
from engine.native.startup.fusion import has_router, is_same_model, trial_logits
from engine.native.startup.loading import Loaded, load
from engine.progress import Progress
from engine.sampling.sampler import DeviceSampler, on_host, sample_ids


def build_native_engine(config: EngineConfig, progress: Progress) -> TorchEngine:
    """Build an engine whose steps run on the caller's thread. Raises `EngineStartError` if the engine cannot start."""
    _check_sizes(config)
    check_kv_cache_dtype(config, choose_device(config.device))
    loaded = load(config, progress)
    kernels = _choose_kernels(config, loaded, progress)
    memory = _divide_memory(config, loaded, kernels)
    info = _describe(config, loaded, kernels, memory)
    runner = ModelRunner(
        loaded.model, memory.cache, [spec.window for spec in loaded.specs], loaded.device, kernels.attention
    )
    if config.optimize and not is_quantised(loaded.model):
        with progress.phase("trying faster layers"):
            _optimize(runner, info, loaded, kernels, exact=config.exact)
    if config.exact:
        if is_quantised(loaded.model):
            raise EngineStartError("--exact cannot be kept by the kernels of a quantised checkpoint: use plain weights")
        with progress.phase("trying exact kernels"):
            keep_exact(runner, info, loaded.device)
    if kernels.graph_sizes:
        with progress.phase("capturing CUDA graphs"):
            _capture_graphs(runner, info, loaded, kernels, memory)
    # On a device, the next step is launched while one runs, when nobody knows what a draft would follow; or a graph
    # replays it as a whole.
    is_in_turn = loaded.device.type == "cpu" and not info.steps_ahead
    # Torch's operators also read the slots of a draft that was rejected, and a NaN in them would spread.
    verifies_drafts = is_in_turn and config.speculate and runner.attention.in_kernels
    info = replace(info, suspends_steps=is_in_turn, verifies_drafts=verifies_drafts)
    _log(info, loaded, memory, config.kv_cache_dtype, runner.is_exact)
    on_device = _device_sampler(info, loaded, kernels)
    if config.exact and loaded.device.type == "cuda" and on_device is sample_ids:
        raise EngineStartError("--exact needs the sampling kernel, which does not work here (see the log)")
    sampler = on_host(on_device) if kernels.library is None else CpuSampler(kernels.library)
    engine = TorchEngine(
        info, runner, memory.swap, sampler=sampler, device_sampler=on_device, prefix_cache=config.prefix_cache
    )
    engine.grammars.load()
    return engine


def _check_sizes(config: EngineConfig) -> None:
    if config.adapters:
        raise EngineStartError("the native engine has no LoRA adapters: use --engine vllm, or leave --adapters out")
    for name in ("block_size", "max_num_seqs", "max_step_tokens", "max_model_len", "kv_cache_bytes", "num_threads"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise EngineStartError(f"{name} is {value}: it must be at least 1")


# -- choose kernels ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of this project that the engine uses. If a kernel is missing, torch's operators do its work."""

    library: ctypes.CDLL | None  # compiled C++ library; only on a CPU
    attention: AttentionKernels | None
    graph_sizes: list[GraphSize]  # of the graphs to capture; empty: no graphs

    @property
    def attention_name(self) -> str:
        if self.attention is None:
            return "matrix products (decode), SDPA (prefill)"
        return "own Triton kernels" if self.library is None else "own C++ kernels"


def _choose_kernels(config: EngineConfig, loaded: Loaded, progress: Progress) -> _Kernels:
    library = load_library(progress) if loaded.device.type == "cpu" and config.optimize else None
    with progress.phase("trying the attention kernels"):
        attention = _attention_kernels(config, loaded, library)
    wants_graphs = config.cuda_graphs and loaded.device.type == "cuda" and attention is not None
    largest = min(config.max_num_seqs, config.max_step_tokens)
    return _Kernels(library, attention, graph_sizes(largest, config.max_step_tokens) if wants_graphs else [])


def _attention_kernels(config: EngineConfig, loaded: Loaded, library: ctypes.CDLL | None) -> AttentionKernels | None:
    if loaded.device.type == "cuda" and config.optimize:
        num_heads = getattr(loaded.hf_config.get_text_config(decoder=True), "num_attention_heads", None)
        num_heads = num_heads if isinstance(num_heads, int) else 1
        fp8 = config.kv_cache_dtype == "fp8"
        where = loaded.dtype, loaded.device
        return working_kernels(kernels_or_fault(loaded.specs, num_heads, *where, exact=config.exact, fp8=fp8))
    return CpuKernels(library, loaded.dtype) if library is not None and CpuKernels.supports(loaded.dtype) else None


# -- divide the memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Memory:
    """The KV cache, and the swap space in host memory."""

    num_blocks: int
    block_bytes: int  # bytes of one block, over all layers
    graph_bytes: int  # bytes reserved for CUDA graphs
    cache: KVCache
    swap: SwapSpace | None


def _divide_memory(config: EngineConfig, loaded: Loaded, kernels: _Kernels) -> _Memory:
    sizes = kernels.graph_sizes
    max_blocks = blocks_for(loaded.wanted_len, config.block_size)  # blocks of the longest sequence
    for_graphs = graph_bytes(sizes, max_blocks, loaded.step_bytes) if sizes else 0
    fp8 = config.kv_cache_dtype == "fp8"
    one_block = block_bytes(loaded.layers, config.block_size, loaded.dtype, fp8=fp8)
    num_blocks = num_kv_blocks(config, loaded.wanted_len, one_block, loaded.step_bytes + for_graphs, loaded.device)
    # If a step has fewer rows than its graph, the padding rows write to one extra block, unknown to the block pool.
    cache = _make_cache(loaded, num_blocks + bool(sizes), config.block_size, fp8=fp8)
    swap = make_swap_space(config, cache, one_block, loaded.device)
    return _Memory(num_blocks, one_block, for_graphs, cache, swap)


def _make_cache(loaded: Loaded, num_blocks: int, block_size: int, *, fp8: bool) -> KVCache:
    try:
        return KVCache(loaded.layers, num_blocks, block_size, loaded.dtype, loaded.device, fp8=fp8)
    except (torch.OutOfMemoryError, MemoryError, OSError) as error:
        raise EngineStartError(f"not enough memory for {num_blocks} KV blocks") from error


# -- describe the engine -------------------------------------------------------------------------------------------


def _describe(config: EngineConfig, loaded: Loaded, kernels: _Kernels, memory: _Memory) -> EngineInfo:
    device, swap = loaded.device, memory.swap
    return EngineInfo(
        model_path=config.model,
        max_model_len=fitting_model_len(config, loaded.wanted_len, memory.num_blocks),
        vocab_size=loaded.hf_config.get_text_config(decoder=True).vocab_size,
        block_size=config.block_size,
        num_blocks=memory.num_blocks,
        max_step_tokens=config.max_step_tokens,
        eos_token_ids=eos_token_ids(loaded.model, loaded.hf_config),
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention_backend=kernels.attention_name,
        preemption_modes=("pause", "swap", "recompute") if swap else ("pause", "recompute"),
        num_swap_blocks=swap.num_blocks if swap else 0,
        swap_block_s=swap.measure() if swap else 0.0,
        steps_ahead=int(device.type == "cuda") if config.steps_ahead is None else config.steps_ahead,
        caches_prefixes=config.prefix_cache,
        num_layers=len(loaded.specs),
    )


def _log(info: EngineInfo, loaded: Loaded, memory: _Memory, kv_cache_dtype: str, is_exact: bool) -> None:
    structlog.get_logger(__name__).info(
        "engine ready",
        model=info.model_path,
        architecture=type(loaded.hf_config).__name__.removesuffix("Config"),
        device=info.device,
        dtype=info.dtype,
        attention=info.attention_backend,
        max_model_len=info.max_model_len,
        kv_blocks=info.num_blocks,
        block_size=info.block_size,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_mib=round(info.num_blocks * memory.block_bytes / (1 << 20)),
        swap_blocks=info.num_swap_blocks,
        cpu_threads=torch.get_num_threads(),
        suspends_steps=info.suspends_steps,
        verifies_drafts=info.verifies_drafts,
        exact=is_exact,
    )


# -- make the model faster ------------------------------------------------------------------------------------------


def _optimize(runner: ModelRunner, info: EngineInfo, loaded: Loaded, kernels: _Kernels, *, exact: bool) -> None:
    """Replace layers by faster ones. Raises `EngineStartError` if this changes the results of the whole model."""
    before, routes = trial_logits(runner, info), has_router(loaded.model)
    if loaded.device.type == "cpu":
        optimize_for_cpu(loaded.model, runner, kernels.library, info)
    elif kernels.attention is not None:
        optimize_for_cuda(loaded.model, runner, info, exact=exact)
    if not is_same_model(before, trial_logits(runner, info), runner.dtype, routes=routes):
        raise EngineStartError(f"{info.model_path} computes something else with faster layers: use --no-optimize")


def _capture_graphs(runner: ModelRunner, info: EngineInfo, loaded: Loaded, kernels: _Kernels, memory: _Memory) -> None:
    graphs = capture_graphs(runner, memory.cache, info, kernels.graph_sizes, memory.graph_bytes, loaded.device)
    if graphs is not None:
        runner.use_graphs(graphs)


def _device_sampler(info: EngineInfo, loaded: Loaded, kernels: _Kernels) -> DeviceSampler:
    if kernels.attention is None or loaded.device.type != "cuda":
        return sample_ids
    return working_sampler(info.vocab_size, loaded.dtype, loaded.device)
