"""The configuration of an engine, and the error that says why an engine cannot start.

Plain data: knows names, sizes and seconds; not torch, and not where the values come from (the settings).
"""

from dataclasses import dataclass
from typing import Literal

LoadFormat = Literal["auto", "dummy"]


class EngineStartError(Exception):
    """The engine cannot start; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of an engine. A value of None is chosen from the model and from what the machine has free."""

    model: str  # a directory of a transformers model, or a hub id
    load_format: LoadFormat = "auto"  # dummy: random weights in the shape of the config, for benchmarks
    dtype: str = "auto"  # or float32, bfloat16, float16
    device: str = "auto"  # or cpu, cuda, cuda:1 …
    block_size: int = 16  # tokens of a KV block
    max_model_len: int | None = None  # most tokens of a sequence, prompt and output together
    max_num_seqs: int = 256  # sequences that the default KV cache is sized for
    max_step_tokens: int = 2048  # most tokens that one step may run
    kv_cache_bytes: int | None = None  # device memory for KV
    swap_bytes: int | None = None  # host memory for the KV of swapped sequences; None: chosen on CUDA, 0 on a CPU
    prefix_cache: bool = True
    num_threads: int | None = None  # CPU threads of one operator
    steps_ahead: Literal[0, 1] | None = None  # 1: async scheduling; 0: none; None: 1 on CUDA, 0 on a CPU
    optimize: bool = True  # False: transformers' modules unchanged, and torch's operators only
    cuda_graphs: bool = True  # run decode steps as captured graphs, where device and model allow it
    seed: int = 0  # for dummy weights
