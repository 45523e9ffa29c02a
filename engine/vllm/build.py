"""Builds the engine over vLLM's executor that a configuration describes, and logs what was chosen.

vLLM is imported only after its version was checked, and after the environment variables that it reads are set.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import structlog

from engine.config import EngineConfig, EngineStartError
from engine.interface import EngineInfo, NewSequence, Run, SamplingParams, StepPlan
from engine.progress import NO_PROGRESS, Progress
from engine.vllm.arguments import engine_args
from engine.vllm.constraints import Constraints
from engine.vllm.stepper import VllmStepper

if TYPE_CHECKING:
    from engine.vllm.executor import VllmExecutor

SUPPORTED = "0.32"  # the minor version of vLLM with which the tests ran
_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the messages are those of the other model runner
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",  # a sequence with such logits fails alone
}
_ENVIRONMENT_DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def build_vllm_stepper(config: EngineConfig, progress: Progress = NO_PROGRESS) -> VllmStepper:
    """Build an engine whose steps vLLM computes. Raises `EngineStartError` if the engine cannot start."""
    check_version()
    _check_settings(config)
    _set_environment(config)
    with progress.phase("starting vLLM", draws_itself=True):
        vllm_config, executor = _start(config)
    info = _describe(config, vllm_config, executor)
    _log(info, vllm_config, executor)
    constraints = Constraints(info)
    constraints.grammars.load()
    stepper = VllmStepper(info, executor, constraints, prefix_cache=config.prefix_cache)
    with progress.phase("compiling log probabilities"):
        _compile_logprobs(stepper)
    executor.freeze_heaps()
    return stepper


def _compile_logprobs(stepper: VllmStepper) -> None:
    """Let vLLM compile its code for log probabilities, which takes seconds, before anyone waits for a step.

    It compiles for one row, for a fixed number of rows, and then for any number.
    """
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=1)
    for count in (1, 2, 3):
        news = tuple(NewSequence(f"start-{count}-{i}", (0,), params) for i in range(count))
        stepper.step(StepPlan(-count, start=news, run=tuple(Run(new.seq_id, 1) for new in news)))


def check_version() -> None:
    """Raise `EngineStartError` if vLLM is missing or has another version than the one that the tests ran with."""
    try:
        found = version("vllm")
    except PackageNotFoundError as error:
        raise EngineStartError("--engine vllm needs vLLM: pip install 'tidegate[vllm]'") from error
    if not found.startswith(f"{SUPPORTED}."):
        raise EngineStartError(
            f"--engine vllm works with vLLM {SUPPORTED}, and {found} is installed: pip install 'vllm=={SUPPORTED}.*'"
        )


def _check_settings(config: EngineConfig) -> None:
    if config.device not in ("auto", "cpu", "cuda"):
        raise EngineStartError(
            f"--engine vllm chooses its devices itself: set CUDA_VISIBLE_DEVICES, not {config.device}"
        )
    if config.swap_bytes:
        raise EngineStartError("--engine vllm does not swap KV to host memory: leave --swap-mb out")


def _set_environment(config: EngineConfig) -> None:
    os.environ.update(_ENVIRONMENT)
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if config.num_threads is not None:
        cores = sorted(os.sched_getaffinity(0))[: config.num_threads]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))


def _start(config: EngineConfig) -> "tuple[Any, VllmExecutor]":
    from engine.vllm.executor import VllmExecutor  # imports vLLM

    args = engine_args(config)
    try:
        vllm_config = args.create_engine_config()
        return vllm_config, VllmExecutor(vllm_config, config.adapters)
    except EngineStartError as error:
        raise EngineStartError(f"vLLM cannot run {config.model}: {error}") from error
    except Exception as error:  # vLLM's errors have no common type
        raise EngineStartError(f"vLLM cannot start with {config.model}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:500]}" if lines else type(error).__name__


def _describe(config: EngineConfig, vllm_config: Any, executor: "VllmExecutor") -> EngineInfo:
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return EngineInfo(
        model_path=config.model,
        max_model_len=min(model.max_model_len, executor.num_blocks * executor.block_size),
        vocab_size=model.get_vocab_size(),
        block_size=executor.block_size,
        num_blocks=executor.num_blocks,
        max_step_tokens=config.max_step_tokens,
        eos_token_ids=_eos_token_ids(model),
        device=current_platform.device_type if current_platform.is_cpu() else current_platform.get_device_name(),
        dtype=str(model.dtype).removeprefix("torch."),
        attention_backend=f"vLLM {version('vllm')}, {executor.name}",
        steps_ahead=_steps_ahead(config, parallel),
        adapters=tuple(name for name, _ in config.adapters),
        caches_prefixes=config.prefix_cache,
        num_layers=model.get_total_num_hidden_layers(),
    )


def _steps_ahead(config: EngineConfig, parallel: Any) -> int:
    """Return the number of plans that may be made ahead: none with pipeline stages, which are sent sampled tokens."""
    if parallel.pipeline_parallel_size > 1:
        return 0
    return 1 if config.steps_ahead is None else config.steps_ahead


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Return all token ids that end a sequence: none, one or several."""
    declared = model.try_get_generation_config().get("eos_token_id")
    if declared is None:
        declared = getattr(model.hf_text_config, "eos_token_id", None)
    if declared is None:
        return ()
    return (declared,) if isinstance(declared, int) else tuple(declared)


def _log(info: EngineInfo, vllm_config: Any, executor: "VllmExecutor") -> None:
    parallel = vllm_config.parallel_config
    structlog.get_logger(__name__).info(
        "engine ready",
        engine="vllm",
        vllm=version("vllm"),
        model=info.model_path,
        executor=executor.name,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        device=info.device,
        dtype=info.dtype,
        quantization=vllm_config.model_config.quantization,
        max_model_len=info.max_model_len,
        kv_blocks=info.num_blocks,
        block_size=info.block_size,
        steps_ahead=info.steps_ahead,
        adapters=list(info.adapters),
    )
