"""Our engine, stepped directly in the caller's thread, to measure its speed without the scheduler."""

from collections.abc import Sequence
from dataclasses import replace

from bench.engines.systems.offline import generate_offline
from bench.engines.systems.protocol import SystemSpec
from engine.config import EngineConfig, Quantization
from engine.factory import build_torch_engine


def engine_config(spec: SystemSpec) -> EngineConfig:
    """Return the configuration of our engine: the defaults, with the model, threads and KV memory of `spec`."""
    return EngineConfig(
        model=spec.model_dir,
        dtype=spec.dtype,
        device=spec.device,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        kv_cache_bytes=spec.kv_tokens * spec.kv_token_bytes or None,
        num_threads=spec.num_threads,
    )


class DirectEngine:
    quantize: Quantization | None = None

    def __init__(self, spec: SystemSpec) -> None:
        self._engine = build_torch_engine(replace(engine_config(spec), quantize=self.quantize))

    @property
    def settings(self) -> str:
        info = self._engine.info
        return f"{info.attention_backend}; {info.max_step_tokens} tokens a step, blocks of {info.block_size}"

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        return generate_offline(self._engine, prompts, new_tokens)

    def close(self) -> None:
        self._engine.close()


class Int8Engine(DirectEngine):
    quantize: Quantization | None = "int8"


class Int4Engine(DirectEngine):
    quantize: Quantization | None = "int4"
