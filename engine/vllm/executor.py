"""Starts vLLM's executor with its KV cache, and runs batches on it.

Knows vLLM's executors (one process, several processes, Ray) and in which order they are set up; does not know plans or
sampling. vLLM's internals move with every minor version: `build.py` checks that it is the version of the tests.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from vllm import envs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from engine.config import EngineStartError
from engine.sequences.chunk import Chunk, Outcome
from engine.vllm.batch import Batch, ExecutorDied
from engine.vllm.messages import Messages, decode
from engine.vllm.worker import COMPUTE_STEP, FREEZE_HEAP

LOOK_MS = 10  # longest time between two looks for the answer of a worker process


class VllmExecutor:
    """vLLM's executor. Implements `BatchExecutor`.

    One thread of its own waits for vLLM. With the executor `uni`, this thread also loads the model and computes,
    because OpenMP gives each computing thread a pool of its own.
    """

    def __init__(self, vllm_config: Any, adapters: Sequence[tuple[str, str]]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._executor, self._cache = self._thread.submit(_set_up, vllm_config).result()
        self.max_num_seqs: int = vllm_config.scheduler_config.max_num_seqs
        has_stages = vllm_config.parallel_config.pipeline_parallel_size > 1
        self._messages = Messages(vllm_config.model_config.get_vocab_size(), adapters, sends_tokens=has_stages)
        self._computes_here = vllm_config.parallel_config.distributed_executor_backend == "uni"
        self._has_queues = hasattr(self._executor, "response_mqs")

    @property
    def name(self) -> str:
        return type(self._executor).__name__

    @property
    def block_size(self) -> int:
        size: int = self._cache.kv_cache_groups[0].kv_cache_spec.block_size
        return size

    @property
    def num_blocks(self) -> int:
        """The number of blocks without vLLM's null block."""
        return int(self._cache.num_blocks) - 1

    def start(self, batch: Batch) -> "Future[dict[str, Outcome]]":
        """Start a batch and return at once."""
        step, grammar = self._messages.encode(batch)
        if self._computes_here:
            return self._thread.submit(lambda: decode(self._compute(step, grammar), batch.chunks))
        if self._has_queues:
            computing = self._compute_in_workers(step, grammar)
            return self._thread.submit(lambda: decode(computing.result(), batch.chunks))
        computed = self._executor.execute_model(step, non_block=True)
        sampled = self._executor.sample_tokens(grammar, non_block=True)
        return self._thread.submit(lambda: _wait(computed, sampled, batch.chunks))

    def check_alive(self) -> None:
        if getattr(self._executor, "is_failed", False):  # executors without processes have no such state
            raise ExecutorDied("a process of vLLM's executor has ended")

    def freeze_heaps(self) -> None:
        """Let garbage collections in the workers leave out what their start has made."""
        self._executor.collective_rpc(FREEZE_HEAP)

    def close(self) -> None:
        self._thread.submit(self._executor.shutdown).result()
        self._thread.shutdown()

    def _compute(self, step: Any, grammar: Any) -> Any:
        output = self._executor.execute_model(step)
        return self._executor.sample_tokens(grammar) if output is None else output

    def _compute_in_workers(self, step: Any, grammar: Any) -> "Future[Any]":
        computing: Future[Any] = self._executor.collective_rpc(
            COMPUTE_STEP,
            timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
            args=(step, grammar),
            non_block=True,
            unique_reply_rank=self._executor.output_rank,
        )
        return computing


def _wait(computed: "Future[Any]", sampled: "Future[Any]", chunks: tuple[Chunk, ...]) -> dict[str, Outcome]:
    output = computed.result()
    sampled_output = sampled.result()
    return decode(sampled_output if output is None else output, chunks)


class _CacheSetUp(EngineCore):  # type: ignore[misc]
    """Only the part of vLLM's engine that gives the workers their KV cache."""

    def __init__(self, vllm_config: Any, executor: Executor) -> None:
        self.vllm_config = vllm_config
        self.model_executor = executor
        self.log_stats = False
        self.available_gpu_memory_for_kv_cache = -1


def _set_up(vllm_config: Any) -> tuple[Executor, Any]:
    """Start the workers, load the model, allocate the KV cache and warm up."""
    executor = Executor.get_class(vllm_config)(vllm_config)
    try:
        cache = _CacheSetUp(vllm_config, executor)._initialize_kv_caches(vllm_config)
        _check_cache(cache)
        _wait_without_spinning(executor)
    except BaseException:
        executor.shutdown()
        raise
    return executor, cache


def _wait_without_spinning(executor: Any) -> None:
    """Let the thread that waits for worker processes sleep until they answer.

    vLLM spins there, during the whole step. So it takes a core from threads that compute, and the interpreter from the
    event loop of the scheduler, which makes the next plan meanwhile. Executors without processes have no such queues.
    """
    for queue in getattr(executor, "response_mqs", ()):
        condition = queue._spin_condition
        if condition is not None:  # it is None between machines
            condition.busy_loop_s = 0.0
            condition.wait = partial(_wait_for_answer, condition.wait)


def _wait_for_answer(wait: Callable[[int], None], timeout_ms: int | None = None) -> None:
    """Wait until a process tells of an answer, at most `LOOK_MS`: vLLM drops its word soon after another one."""
    wait(LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS))


def _check_cache(cache: Any) -> None:
    if len(cache.kv_cache_groups) != 1:
        raise EngineStartError(
            f"its layers need {len(cache.kv_cache_groups)} kinds of KV cache, and --engine vllm has one"
        )
