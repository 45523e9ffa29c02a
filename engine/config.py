"""The configuration of an engine, and the error that says why an engine cannot start.

This module is plain data. It knows names and sizes; it does not know torch, or the settings from which the values come.
"""

from dataclasses import dataclass
from typing import Literal

from engine.interface import ModelKind

LoadFormat = Literal["auto", "dummy"]
EngineKind = Literal["native", "vllm", "embedding"]
Quantization = Literal["int8", "int4"]
KVCacheDtype = Literal["auto", "fp8"]


class EngineStartError(Exception):
    """The error of an engine that cannot start. The message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of an engine. If a value is None, the engine derives it from the model and the hardware."""

    model: str  # a directory of a transformers model, or a hub id
    load_format: LoadFormat = "auto"  # dummy: random weights in the shapes of the config, for benchmarks
    dtype: str = "auto"  # or float32, bfloat16, float16
    quantize: Quantization | None = None  # round the weights of linear layers after loading
    device: str = "auto"  # or cpu, cuda, cuda:1 …
    block_size: int = 16  # tokens in a KV block
    max_model_len: int | None = None  # maximum tokens in a sequence, prompt and output together
    max_num_seqs: int = 256  # number of sequences for which the default KV cache has room
    max_step_tokens: int = 2048  # maximum number of tokens that one step computes
    kv_cache_bytes: int | None = None  # device memory for KV
    kv_cache_dtype: KVCacheDtype = "auto"  # auto: the model's dtype; fp8: float8_e4m3fn, with a scale for each head
    swap_bytes: int | None = None  # host memory for the KV of swapped sequences; None: a default on CUDA, 0 on a CPU
    prefix_cache: bool = True
    speculate: bool = True  # verify drafts, if the engine can
    num_threads: int | None = None  # CPU threads that one operator may use
    steps_ahead: Literal[0, 1] | None = None  # 1: async scheduling; 0: no async scheduling; None: 1 on CUDA, 0 on a CPU
    optimize: bool = True  # False: use transformers' modules unchanged, and only torch's operators
    exact: bool = False  # True: the bits of a sequence's tokens do not depend on other sequences or on the schedule
    cuda_graphs: bool = True  # run decode steps as captured graphs, if device and model allow it
    seed: int = 0  # seed of dummy weights
    engine: EngineKind = "native"
    kind: ModelKind = "chat"  # of the model
    vllm_args: str = ""  # flags of vLLM's own, for the engine `vllm`
    adapters: tuple[tuple[str, str], ...] = ()  # LoRA adapters: (name, directory or hub id)
