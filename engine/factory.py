"""Builds an engine. Importing this module does not import torch; building an engine does.

torch loads the OpenMP library of the CPU's threads (libgomp), which reads its environment variables only once, when it
is loaded. So this module sets them before it imports torch. Our own kernels are linked with the same library.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.imports import without_collections
from engine.interface import Engine
from engine.progress import NO_PROGRESS, Progress
from engine.thread import EngineThread, Stepper

if TYPE_CHECKING:
    from engine.native.execution.torch_engine import TorchEngine

# Number of times that a thread that waits at a barrier looks before it sleeps. libgomp's default of 300,000 takes
# milliseconds, for which the thread keeps its core from the gateway and from other processes.
SPIN_COUNT = 2000


def build_engine(
    config: EngineConfig, progress: Progress = NO_PROGRESS, when_imported: Callable[[], None] = lambda: None
) -> Engine:
    """Build an engine that runs on its own thread. Raises `EngineStartError` if the engine cannot start.

    `progress` is told how far it is, partly on that thread. `when_imported` is called once all modules are imported,
    before any garbage collection looks through them.
    """
    with progress.phase("loading PyTorch"), without_collections():
        builder = _builder_of(config)
        when_imported()
    return EngineThread(partial(builder, config, progress))


def build_torch_engine(config: EngineConfig, progress: Progress = NO_PROGRESS) -> "TorchEngine":
    """Build an engine whose steps run on the caller's thread; calibration needs such an engine.

    Raises `EngineStartError` if the engine cannot start.
    """
    with progress.phase("loading PyTorch"), without_collections():
        builder = _load_builder(config.device)
    return builder(config, progress)


def _builder_of(config: EngineConfig) -> "Callable[[EngineConfig, Progress], Stepper]":
    match config.engine:
        case "vllm":
            return _load_vllm_builder()
        case "embedding":
            return _load_embedding_builder(config.device)
    return _load_builder(config.device)


def _load_builder(device: str) -> "Callable[[EngineConfig, Progress], TorchEngine]":
    """Return the function that builds the native engine."""
    _prepare_torch(device)
    from engine.native.startup.engine_builder import build_native_engine  # imports torch

    return build_native_engine


def _load_embedding_builder(device: str) -> "Callable[[EngineConfig, Progress], Stepper]":
    """Return the function that builds the engine over sentence-transformers."""
    from engine.embedding.build import build_embedding_stepper  # sentence-transformers is imported by the call

    _prepare_torch(device)
    return build_embedding_stepper


def _prepare_torch(device: str) -> None:
    """Import torch, and choose what its threads do while they wait. If it was imported before, this has no effect.

    Without a GPU, torch and transformers find no Triton. They would import it where it is installed, and a process that
    has done so complains of leaks when it ends.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    from engine.native.device import choose_device  # imports torch, which imports no Triton by itself

    if choose_device(device).type == "cpu" and "triton" not in sys.modules:
        sys.modules["triton"] = None  # type: ignore[assignment]  # Python's mark of a module that cannot be imported


def _load_vllm_builder() -> "Callable[[EngineConfig, Progress], Stepper]":
    """Return the function that builds the engine over vLLM's executor.

    `SPIN_COUNT` is not set for vLLM: its threads compute many small parts of a step, and would take a seventh longer
    if they slept between them.
    """
    from engine.vllm.build import build_vllm_stepper  # imports torch; vLLM is imported by the call

    return build_vllm_stepper
