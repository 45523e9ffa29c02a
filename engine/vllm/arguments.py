"""The arguments of vLLM's engine: the operator's (`--vllm-args`), parsed by vLLM's own parser, and the project's.

Knows flags; starts nothing. A flag for something that the project decides itself is refused by its name.
"""

import os
import shlex
from typing import Any, NoReturn

from engine.config import EngineConfig, EngineStartError
from engine.vllm.worker import WORKER_EXTENSION

# vLLM's flags for what this project decides, and where it is decided.
OWNED_FLAGS = {
    "model": "--model",
    "dtype": "--dtype",
    "load-format": "--load-format",
    "max-model-len": "--max-model-len",
    "max-num-batched-tokens": "--max-step-tokens",
    "kv-cache-memory-bytes": "--kv-cache-mb",
    "enable-prefix-caching": "--prefix-cache",
    "served-model-name": "--served-model-name",
    "generation-config": "--sampling-defaults",
    "seed": "each request's seed",
    "scheduling-policy": "the tiers",
    "scheduler-cls": "the tiers",
    "async-scheduling": "the tiers",
    "enable-chunked-prefill": "the tiers",
    "long-prefill-token-threshold": "the tiers",
    "max-num-partial-prefills": "the tiers",
    "max-long-partial-prefills": "the tiers",
    "stream-interval": "the tiers",
    "disable-hybrid-kv-cache-manager": "one KV cache for all layers",
    "logits-processors": "the request's sampling options",
    "worker-extension-cls": "one message for each step",
    "max-logprobs": "the gateway's limits",
    "logprobs-mode": "the request's log probabilities",
    "structured-outputs-config": "the request's response_format",
    "reasoning-parser": "the gateway",
    "enable-lora": "--adapters",
    "max-loras": "--adapters",
    "lora-modules": "--adapters",
    "default-mm-loras": "--adapters",
    "runner": "text generation only",
    "convert": "text generation only",
    "data-parallel-size": "one worker for each replica",
    "speculative-config": "one token a step",
    "kv-transfer-config": "one KV cache",
    "kv-offloading-size": "one KV cache",
    "ec-transfer-config": "text only",
}
_CPU_MEMORY_SHARE = 0.25  # of the free host memory, for KV on a CPU: weights, steps and other processes need the rest
PROCESSOR = "engine.vllm.logits_processor:PositionalSampling"


def engine_args(config: EngineConfig) -> Any:
    """Return vLLM's `EngineArgs`. Raises `EngineStartError` for a flag that vLLM does not know or the project owns."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = shlex.split(config.vllm_args)
    refuse_owned(given)

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise EngineStartError(f"--vllm-args: {message}")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    parsed = vars(parser.parse_args(given))
    chosen = {name: value for name, value in parsed.items() if value != parser.get_default(name)}
    own = _own(config) | _cpu_memory(config, chosen) | _lora(config)
    return EngineArgs(**(_defaults(config) | chosen | own))


def refuse_owned(given: list[str]) -> None:
    """Raise `EngineStartError` if one of the operator's flags is for something that the project decides itself."""
    for word in given:
        name = word.removeprefix("--").split("=")[0].replace("_", "-")
        owner = OWNED_FLAGS.get(name) or OWNED_FLAGS.get(name.removeprefix("no-"))
        if word.startswith("--") and owner is not None:
            raise EngineStartError(f"--vllm-args must not have --{name}: Tidegate decides it ({owner})")


def _defaults(config: EngineConfig) -> dict[str, Any]:
    """Return what the operator may change."""
    return {"max_num_seqs": config.max_num_seqs, "disable_log_stats": True}


def _cpu_memory(config: EngineConfig, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the size of a KV cache in host memory. Without it, vLLM would take nearly all of the memory."""
    import psutil  # comes with vLLM
    from vllm.platforms import current_platform

    is_chosen = config.kv_cache_bytes or "gpu_memory_utilization" in chosen or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if is_chosen or not current_platform.is_cpu():
        return {}
    return {"kv_cache_memory_bytes": int(psutil.virtual_memory().available * _CPU_MEMORY_SHARE)}


def _lora(config: EngineConfig) -> dict[str, Any]:
    """Return room for all adapters in one batch, so that a plan need not know of them.

    One slot stays empty: on a CPU, vLLM 0.32 computes sequences without an adapter with the weights of the last slot.
    """
    return {"enable_lora": True, "max_loras": len(config.adapters) + 1} if config.adapters else {}


def _own(config: EngineConfig) -> dict[str, Any]:
    return {
        "model": config.model,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": config.max_step_tokens,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "seed": config.seed,
        "enable_prefix_caching": False,  # the project's own prefix cache knows salts and retention
        "async_scheduling": False,  # steps ahead are planned here
        "disable_hybrid_kv_cache_manager": True,
        "logits_processors": [PROCESSOR],
        "worker_extension_cls": WORKER_EXTENSION,
    }
