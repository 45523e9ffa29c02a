"""The two systems of the transformers library: continuous batching, and `generate` with one request at a time.

Both use SDPA attention, greedy sampling and no end-of-sequence token. Continuous batching keeps one manager running, so
that no measurement includes its start. Requests are added to the manager one by one, because `generate_batch` allows
only one output length for all requests; `generate_batch` runs the same loop inside.
"""

from collections.abc import Sequence
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, BatchEncoding, ContinuousBatchingConfig, GenerationConfig

from bench.engines.systems.protocol import SystemSpec

PAGE_SIZE = 256  # tokens; transformers' own default
MAX_BATCH_TOKENS = 2048  # our engine's own default
NO_EOS = -1  # a token id that never occurs
RESULT_TIMEOUT_S = 120.0  # longest wait for the next result; a longer wait means that the system has failed
END_TIMEOUT_S = 10.0  # longest wait for the end of the manager's thread


class ContinuousBatching:
    """Continuous batching of transformers, with its own choices of CUDA graphs, asynchronous batching and attention."""

    def __init__(self, spec: SystemSpec) -> None:
        self._model = _load(spec)
        config = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=0)
        self._manager = self._model.init_continuous_batching(
            generation_config=config, continuous_batching_config=_batching_config(spec)
        )
        self._manager.warmup()
        self._manager.start()

    @property
    def settings(self) -> str:
        config = self._manager.continuous_batching_config
        attention = self._model.config._attn_implementation
        return (
            f"transformers {transformers.__version__}, {attention}, pages of {config.page_size}, "
            f"{config.max_batch_tokens} tokens a batch, CUDA graphs {config.use_cuda_graph}, "
            f"asynchronous {config.use_async_batching}, no prefix sharing, one running manager"
        )

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        ids = [
            self._manager.add_request(list(prompt), max_new_tokens=count)
            for prompt, count in zip(prompts, new_tokens, strict=True)
        ]
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(ids):
            result = self._manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None:
                raise TimeoutError(
                    f"no result in {RESULT_TIMEOUT_S:.0f} s; is it running: {self._manager.is_running()}"
                )
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[i] for i in ids]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=END_TIMEOUT_S)


class OneAtATime:
    """The `generate` method of transformers, called with one request after another."""

    def __init__(self, spec: SystemSpec) -> None:
        self._model = _load(spec)
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    @property
    def settings(self) -> str:
        return f"transformers {transformers.__version__}, generate, sdpa, dynamic cache, not compiled"

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        return [self._generate_one(list(p), count) for p, count in zip(prompts, new_tokens, strict=True)]

    def close(self) -> None:
        """Do nothing: no thread runs between two calls."""

    def _generate_one(self, prompt: list[int], count: int) -> list[int]:
        encoded = BatchEncoding({"input_ids": [prompt], "attention_mask": [[1] * len(prompt)]}, tensor_type="pt")
        output = self._model.generate(**encoded.to(self._model.device), max_new_tokens=count, min_new_tokens=count)
        tokens: list[int] = output[0].tolist()[len(prompt) :]
        return tokens


def _load(spec: SystemSpec) -> Any:
    model = AutoModelForCausalLM.from_pretrained(spec.model_dir, dtype=spec.dtype, attn_implementation="sdpa")
    return model.to(spec.device).eval()


def _batching_config(spec: SystemSpec) -> Any:
    """Return the configuration of transformers' continuous batching.

    Cache sizes are set, since several systems share the memory of one machine. Block sharing is off, since no two
    prompts are alike.
    """
    return ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=-(-spec.kv_tokens // PAGE_SIZE) + spec.max_num_seqs,
        max_batch_tokens=MAX_BATCH_TOKENS,
        allow_block_sharing=False,
    )
