"""The surface of vLLM that this room uses: a list of names, for `python -m bench vllm-surface`.

Whoever uses more of vLLM adds it here; a test finds imports that are missing. Does not import vLLM.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Used:
    """A class, function or variable of vLLM, and what is used of it.

    `members` are fields, attributes and methods. Those of the form `method(a, b)` name the parameters that are passed.
    """

    module: str
    name: str
    members: tuple[str, ...] = ()
    is_built: bool = False  # it is constructed here with the fields in `members`: there must be no other required field


SURFACE = (
    Used(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        (
            *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"),
            *("scheduled_spec_decode_tokens", "scheduled_encoder_inputs", "finished_req_ids"),
            *("free_encoder_mm_hashes", "new_block_ids_to_zero"),
        ),
        is_built=True,
    ),
    Used(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        (
            *("req_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "block_ids"),
            *("num_computed_tokens", "lora_request"),
        ),
        is_built=True,
    ),
    Used(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        (
            *("make_empty()", "req_ids", "num_computed_tokens", "num_output_tokens", "new_token_ids"),
            *("resumed_req_ids", "all_token_ids", "new_block_ids"),
        ),
    ),
    Used(
        "vllm.v1.core.sched.output",
        "GrammarOutput",
        ("structured_output_request_ids", "grammar_bitmask"),
        is_built=True,
    ),
    Used(
        "vllm.v1.outputs",
        "ModelRunnerOutput",
        ("req_id_to_index", "sampled_token_ids", "logprobs", "prompt_logprobs_dict", "num_nans_in_logits"),
    ),
    Used("vllm.v1.outputs", "LogprobsLists", ("logprob_token_ids", "logprobs")),
    Used("vllm.v1.outputs", "LogprobsTensors", ("logprob_token_ids", "logprobs")),
    Used(
        "vllm.v1.executor.abstract",
        "Executor",
        (
            *("get_class(vllm_config)", "execute_model(scheduler_output, non_block)"),
            *("sample_tokens(grammar_output, non_block)", "collective_rpc(method, timeout, args, non_block)"),
            "shutdown()",
        ),
    ),
    Used(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor",
        (
            *("collective_rpc(method, timeout, args, non_block, unique_reply_rank)", "response_mqs", "output_rank"),
            "is_failed",
        ),
    ),
    Used("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition", ("busy_loop_s", "wait(timeout_ms)")),
    Used("vllm.distributed.device_communicators.shm_broadcast", "MessageQueue", ("_spin_condition",)),
    Used("vllm.v1.engine.core", "EngineCore", ("_initialize_kv_caches(vllm_config)",)),
    Used("vllm.v1.kv_cache_interface", "KVCacheConfig", ("num_blocks", "kv_cache_groups")),
    Used("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", ("kv_cache_spec",)),
    Used("vllm.v1.kv_cache_interface", "KVCacheSpec", ("block_size",)),
    Used(
        "vllm.v1.sample.logits_processor",
        "LogitsProcessor",
        ("is_argmax_invariant()", "update_state(batch_update)", "apply(logits)"),
    ),
    Used("vllm.v1.sample.logits_processor", "BatchUpdate"),
    Used("vllm.v1.sample.logits_processor", "process_dict_updates"),
    Used("vllm.v1.worker.gpu_model_runner", "count_nans_per_row"),
    Used("vllm.v1.worker.worker_base", "WorkerBase", ("execute_model(scheduler_output)", "sample_tokens")),
    Used(
        "vllm.sampling_params",
        "SamplingParams",
        ("temperature", "max_tokens", "ignore_eos", "detokenize", "logprobs", "prompt_logprobs", "extra_args"),
    ),
    Used("vllm.lora.request", "LoRARequest", ("lora_name", "lora_int_id", "lora_path"), is_built=True),
    Used(
        "vllm.engine.arg_utils",
        "EngineArgs",
        (
            *("add_cli_args(parser)", "create_engine_config()", "model", "dtype", "load_format", "max_model_len"),
            *("max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes", "seed", "enable_prefix_caching"),
            *("async_scheduling", "disable_hybrid_kv_cache_manager", "logits_processors", "worker_extension_cls"),
            *("enable_lora", "max_loras", "disable_log_stats"),
        ),
    ),
    Used("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
    Used("vllm.config", "VllmConfig", ("model_config", "parallel_config", "scheduler_config")),
    Used("vllm.config", "SchedulerConfig", ("max_num_seqs",)),
    Used(
        "vllm.config",
        "ParallelConfig",
        ("pipeline_parallel_size", "tensor_parallel_size", "distributed_executor_backend"),
    ),
    Used(
        "vllm.config",
        "ModelConfig",
        (
            *("get_vocab_size()", "max_model_len", "dtype", "quantization", "get_total_num_hidden_layers()"),
            *("try_get_generation_config()", "hf_text_config"),
        ),
    ),
    Used("vllm.platforms", "current_platform"),
    Used("vllm.platforms.interface", "Platform", ("device_type", "is_cpu()", "get_device_name")),
    Used("vllm.envs", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
    Used("vllm.envs", "VLLM_USE_V2_MODEL_RUNNER"),
    Used("vllm.envs", "VLLM_COMPUTE_NANS_IN_LOGITS"),
)
