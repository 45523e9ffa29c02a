"""vLLM's offline generation on the same weights, in the Python interpreter of vLLM's own environment.

Of our modules, this one imports only `protocol`, so that the versions of torch and other packages in vLLM's environment
need not match ours.
"""

import os
from collections.abc import Sequence

import vllm  # type: ignore[import-not-found,unused-ignore]

from bench.engines.systems.protocol import SystemSpec


class OfflineVllm:
    """vLLM's offline `LLM` in one process, so that nothing runs between two orders.

    The benchmark sets VLLM_ENABLE_V1_MULTIPROCESSING=0.
    """

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
        """Do nothing: in one process, no thread of vLLM runs between two calls."""
