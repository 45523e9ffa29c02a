"""The settings of a worker."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from engine.config import KVCacheDtype, Quantization
from tidegate.settings.base import CommonSettings


class WorkerSettings(CommonSettings):
    """Run one engine with its scheduler, on an existing store."""

    worker_id: str | None = Field(
        default=None,
        description="unique among the store's workers; unset: host name and process id (serve: host name and port)",
    )
    health_host: str = Field(
        default="127.0.0.1", description="address of the worker's own port, with /livez, /readyz and /metrics"
    )
    health_port: int = Field(default=0, ge=0, le=65535, description="the worker's own port; 0: any free one")
    engine: Literal["native", "vllm", "openai", "static", "embedding"] = Field(
        default="native",
        description="native: this program's own engine; vllm: vLLM's executor computes the steps; openai: a server at "
        "--upstream; static: an endpoint with fixed batches that serves /v1/tasks, and no model; embedding: "
        "sentence-transformers computes an embedding model or a reranker",
    )
    vllm_args: str | None = Field(
        default=None, description="flags of vLLM's own for --engine vllm, such as '--tensor-parallel-size 2'"
    )
    upstream: str | None = Field(
        default=None, description="base URL of an OpenAI-compatible server that generates the tokens (--engine openai)"
    )
    upstream_dialect: Literal["auto", "vllm", "sglang", "llama.cpp", "plain"] = Field(
        default="auto", description="what kind of server the upstream is; auto: as /v1/models tells"
    )
    upstream_model: str | None = Field(
        default=None, description="name of the model at the upstream; unset: the only one that it lists"
    )
    upstream_api_key: SecretStr | None = Field(
        default=None, description="the upstream's API key; better set as TIDEGATE_UPSTREAM_API_KEY"
    )
    upstream_max_in_flight: int | None = Field(
        default=None, ge=1, description="most requests at the upstream at once; unset: learned from its answers"
    )
    upstream_stall_s: float = Field(
        default=30.0, gt=0, description="a stream of the upstream without a token for so long counts as lost"
    )
    device: str = Field(default="auto", description="cpu, cuda, cuda:1 …; auto: CUDA if there is a GPU")
    dtype: str = Field(default="auto", description="float32, bfloat16 or float16; auto: bfloat16 where it is fast")
    quantize: Quantization | None = Field(
        default=None, description="round the weights at the start to 8 or 4 bits, by groups (--engine native)"
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="the most tokens of a prompt and its output together"
    )
    endpoint: str | None = Field(
        default=None, description="of --engine static: http://HOST/PATH, or python:module.function"
    )
    batch: int = Field(default=64, ge=1, le=4096, description="of --engine static: items of a call")
    endpoint_timeout_s: float = Field(
        default=60.0, gt=0, description="of --engine static: the longest time of a call, in seconds"
    )
    max_step_tokens: int = Field(default=2048, ge=16, description="the most tokens in one step")
    kv_cache_mb: int | None = Field(
        default=None, ge=1, description="memory for the KV cache; unset: chosen from the free memory"
    )
    kv_cache_dtype: KVCacheDtype = Field(
        default="auto",
        description="fp8: keys and values in 8 bits, about half the memory (--engine native); auto: those of --dtype",
    )
    swap_mb: int | None = Field(
        default=None,
        ge=0,
        description="host memory for the KV of preempted sequences; unset: up to 4 GiB with CUDA, none without",
    )
    prefix_cache: bool = Field(default=True, description="reuse the KV of prompts with the same beginning")
    speculate: bool = Field(
        default=True, description="compute likely next tokens in the same step where that pays and no bulk is there"
    )
    cuda_graphs: bool = Field(default=True, description="run decode steps as captured CUDA graphs")
    exact: bool = Field(
        default=False,
        description="compute each sequence so that its tokens do not depend on others or on preemption by a single bit "
        "(--engine native); slower",
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of the engine")
    optimize: bool = Field(default=True, description="use faster layers where a trial at start shows equal results")
    step_log: Path | None = Field(
        default=None,
        description="append each step's work and time to this file, at most 1 GB; for `loadtest calibrate`",
    )

    @model_validator(mode="after")
    def _upstream_is_known(self) -> Self:
        if self.engine == "openai" and self.upstream is None:
            raise ValueError("--engine openai needs the URL of a server: --upstream http://HOST:PORT")
        if self.engine != "openai" and self.upstream is not None:
            raise ValueError("--upstream is for --engine openai")
        return self

    @model_validator(mode="after")
    def _engine_takes_images(self) -> Self:
        if self.image_tokens and self.engine != "openai":
            raise ValueError("--image-tokens is for --engine openai: the other engines take no images")
        return self

    @model_validator(mode="after")
    def _engine_quantizes(self) -> Self:
        if self.quantize is not None and self.engine != "native":
            ways = {"vllm": 'use --vllm-args "--quantization …"', "embedding": "--dtype chooses its numbers"}
            way = ways.get(self.engine, "its server chooses the weights")
            raise ValueError(f"--quantize is for --engine native, not {self.engine}: {way}")
        return self

    @model_validator(mode="after")
    def _engine_has_kv_cache_dtype(self) -> Self:
        if self.kv_cache_dtype != "auto" and self.engine != "native":
            ways = {"vllm": 'use --vllm-args "--kv-cache-dtype …"', "openai": "its server chooses it"}
            way = ways.get(self.engine, "it has no KV cache")
            raise ValueError(f"--kv-cache-dtype is for --engine native, not {self.engine}: {way}")
        return self

    @model_validator(mode="after")
    def _engine_is_exact(self) -> Self:
        if self.exact and self.engine != "native":
            ways = {
                "vllm": "set VLLM_BATCH_INVARIANT=1 in the environment for vLLM's own way",
                "openai": "whether rows depend on each other is for its server to say",
            }
            way = ways.get(self.engine, "it generates no tokens")
            raise ValueError(f"--exact is for --engine native, not {self.engine}: {way}")
        return self

    @model_validator(mode="after")
    def _endpoint_is_known(self) -> Self:
        if self.engine == "static" and self.endpoint is None:
            raise ValueError("--engine static needs --endpoint http://HOST/PATH or python:module.function")
        if self.engine != "static" and self.endpoint is not None:
            raise ValueError("--endpoint is for --engine static")
        return self
