"""What an engine is built from, and the one way in which building it fails.

Plain data: knows names, sizes and seconds; not torch, and not where the values come from (the settings).
"""

from dataclasses import dataclass
from typing import Literal

LoadFormat = Literal["auto", "dummy"]


class EngineStartError(Exception):
    """The engine cannot start; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`model` is a transformers directory or a hub id. None means: choose from the model and what is free."""

    model: str
    load_format: LoadFormat = "auto"  # dummy: random weights in the shape of the config, for benchmarks
    dtype: str = "auto"  # or float32, bfloat16, float16
    device: str = "auto"  # or cpu, cuda, cuda:1 …
    block_size: int = 16  # tokens a KV block
    max_model_len: int | None = None  # tokens, prompt and output together
    max_num_seqs: int = 256  # sequences the default KV cache is sized for
    max_step_tokens: int = 2048  # most tokens one step may run
    kv_cache_bytes: int | None = None
    swap_bytes: int | None = None  # host memory for the KV of preempted sequences; None: chosen on CUDA, 0 on a CPU
    prefix_cache: bool = True
    num_threads: int | None = None  # CPU threads of one operator
    steps_ahead: Literal[0, 1] | None = (
        None  # 0: each step is planned behind the one before; None: 1 on CUDA, 0 on a CPU
    )
    optimize: bool = True  # False: transformers' modules as they are, and torch's operators only
    cuda_graphs: bool = True  # decode steps as captured graphs, where the device and the model allow it
    seed: int = 0  # of the dummy weights
