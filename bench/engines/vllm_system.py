"""vLLM offline on the same weights, in the interpreter of its own environment.

Imports only the protocol of ours, so that neither torch versions nor packages need to match.
"""

import os
from collections.abc import Sequence

import vllm  # type: ignore[import-not-found,unused-ignore]

from bench.engines.protocol import SystemSpec


class OfflineVllm:
    """vLLM in one process (the benchmark sets VLLM_ENABLE_V1_MULTIPROCESSING=0), so that nothing runs between two
    orders."""

    def __init__(self, spec: SystemSpec) -> None:
        self._llm = vllm.LLM(
            spec.model_dir,
            skip_tokenizer_init=True,
            dtype=spec.dtype,
            max_model_len=spec.max_model_len,
            max_num_seqs=max(spec.max_num_seqs, 8),
            enable_prefix_caching=False,
            seed=0,
            gpu_memory_utilization=float(os.environ.get("VLLM_GPU_SHARE", "0.3")),
        )

    @property
    def settings(self) -> str:
        return f"vLLM {vllm.__version__}, LLM offline in one process, its defaults, no prefix caching"

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        sampling = [
            vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in new_tokens
        ]
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """In one process nothing of it runs between two calls."""
