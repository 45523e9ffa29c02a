"""The settings of each command: from flags, environment variables (`TIDEGATE_*`) or a YAML file.

Flags override environment variables, and both override the file. Knows names, types and defaults; starts nothing. The
tiers have a file of their own (`scheduler.config`).
"""

import os
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from demo_model.location import demo_model_path
from gateway.keys.webhooks import secret_bytes
from gateway.output.tools.formats import CALL_FORMAT_NAMES

CONFIG_VARIABLE = "TIDEGATE_CONFIG"
STORE_VARIABLE = "TIDEGATE_REDIS_URL"
KEY_VARIABLE = "TIDEGATE_API_KEY"
UPSTREAM_KEY_VARIABLE = "TIDEGATE_UPSTREAM_API_KEY"
WEBHOOK_VARIABLE = "TIDEGATE_WEBHOOK_SECRET"
DEMO_MODEL = "tidegate-demo"


# An entry of `allowed_origins`. Desktop apps have schemes of their own, some of them without a host (`file://`).
ORIGIN = r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]*/?"


class SettingsError(Exception):
    """The settings cannot be used. The message is for the operator."""


def split_list(value: Any) -> list[str] | None:
    """Return the items of a setting that is a list or a text with commas; None if there are none."""
    parts = [value] if isinstance(value, str) else value or []
    return [item.strip() for part in parts for item in str(part).split(",") if item.strip()] or None


def shipped_tiers() -> Path:
    """Return the path of the default tiers.yaml.

    In an installed wheel, the file is in the folder of this module. In a source tree, it is in the top folder.
    """
    here = Path(__file__).resolve().parent
    installed = here / "tiers.yaml"
    return installed if installed.exists() else here.parent / "tiers.yaml"


class CommonSettings(BaseSettings):
    """The settings that every command has."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEGATE_",
        env_ignore_empty=True,  # compose files also pass on variables that are not set
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_parse_none_str="unset",
        protected_namespaces=(),
    )

    config: Path | None = Field(
        default=None, description="YAML file with settings; flags and environment variables override it"
    )
    model: str | None = Field(default=None, description="transformers model directory or hub id; unset: the demo model")
    served_model_name: Annotated[list[str] | None, NoDecode] = Field(
        default=None, description="model name or names that clients use; unset: the name of the model"
    )
    adapters: Annotated[list[str] | None, NoDecode] = Field(
        default=None, description="LoRA adapters of the model as further model names, with --engine vllm: NAME=PATH,…"
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="dummy: random weights with the shapes of the model's config, for benchmarks"
    )
    tiers: Path | None = Field(default=None, description="tiers file; unset: the shipped tiers.yaml")
    redis_url: str | None = Field(
        default=None, description="redis://… or unix://…; unset: `serve` starts its own Valkey"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="console: lines for people; auto: console on a terminal, JSON elsewhere"
    )
    otel: bool = Field(
        default=False,
        description="send traces to the collector of OTEL_EXPORTER_OTLP_ENDPOINT, or on port 4318 of this machine; "
        "also on where that variable is set",
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="seconds that running requests may take to finish after a stop signal"
    )

    @field_validator("adapters")
    @classmethod
    def _are_adapters(cls, value: list[str] | None) -> list[str] | None:
        for entry in value or ():
            if not all(entry.partition("=")):
                raise ValueError(f"{entry!r} is not NAME=PATH")
        return value

    @field_validator("served_model_name", "adapters", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        return split_list(value)

    @property
    def model_path(self) -> str:
        return self.model or str(demo_model_path())

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients use for the model and its adapters. The first one is the main name."""
        own = [self.model.rstrip("/").rsplit("/", 1)[-1] if self.model else DEMO_MODEL]
        return (*(self.served_model_name or own), *self.adapter_paths)

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The directories or hub ids of the LoRA adapters, by name."""
        return {name: path for name, _, path in (entry.partition("=") for entry in self.adapters or ())}

    @property
    def tiers_path(self) -> Path:
        return self.tiers or shipped_tiers()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get(CONFIG_VARIABLE)
        file = YamlConfigSettingsSource(settings_cls, yaml_file=path)
        return init_settings, env_settings, file

    @property
    def secret_env(self) -> dict[str, str]:
        """Secrets for the environment of a child process.

        The store's URL may hold a password, and command lines are visible to all users.
        """
        return {STORE_VARIABLE: self.redis_url} if self.redis_url else {}

    def flags(self, kind: "type[CommonSettings]") -> tuple[str, ...]:
        """Return these settings as command line flags for a child process that reads the settings `kind`.

        Settings that `kind` does not have, and the secrets of `secret_env`, are left out.
        """
        flags: list[str] = []
        for name in kind.model_fields:
            value = getattr(self, name)
            if value is None or name in ("redis_url", "api_key", "upstream_api_key", "webhook_secret"):
                continue
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", ",".join(value) if isinstance(value, list) else str(value)]
        return tuple(flags)


class WorkerSettings(CommonSettings):
    """Run one engine with its scheduler, on an existing store."""

    worker_id: str | None = Field(
        default=None,
        description="unique among the store's workers; unset: host name and process id (serve: host name and port)",
    )
    engine: Literal["native", "vllm", "openai", "static"] = Field(
        default="native",
        description="native: this program's own engine; vllm: vLLM's executor computes the steps; openai: a server at "
        "--upstream; static: an endpoint with fixed batches that serves /v1/tasks, and no model",
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
    swap_mb: int | None = Field(
        default=None,
        ge=0,
        description="host memory for the KV of preempted sequences; unset: up to 4 GiB with CUDA, none without",
    )
    prefix_cache: bool = Field(default=True, description="reuse the KV of prompts with the same beginning")
    cuda_graphs: bool = Field(default=True, description="run decode steps as captured CUDA graphs")
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
    def _endpoint_is_known(self) -> Self:
        if self.engine == "static" and self.endpoint is None:
            raise ValueError("--engine static needs --endpoint http://HOST/PATH or python:module.function")
        if self.engine != "static" and self.endpoint is not None:
            raise ValueError("--endpoint is for --engine static")
        return self

    @property
    def secret_env(self) -> dict[str, str]:
        key = self.upstream_api_key
        return super().secret_env | ({UPSTREAM_KEY_VARIABLE: key.get_secret_value()} if key is not None else {})


class GatewaySettings(CommonSettings):
    """Run the HTTP server, on an existing store."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    data_dir: Path = Field(
        default=Path("data"), description="directory for files, batches and the data of the embedded Valkey"
    )
    api_keys: Path | None = Field(
        default=None, description="YAML file with API keys and their tiers; unset: no key is needed"
    )
    allowed_origins: Annotated[list[str] | None, NoDecode] = Field(
        default=None,
        description="origins of web pages and desktop apps that may use the server, such as https://chat.example, "
        "http://localhost:*, app://obsidian.md, null; *: all; unset: only pages of the server itself",
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="the operator's own API key, or several with commas; better set as TIDEGATE_API_KEY, because other "
        "users of the machine can read flags",
    )
    answer_cache_ttl_s: int = Field(
        default=86_400, ge=1, description="the longest time that a request may keep its answer in the answer cache"
    )
    answer_cache_mb: int = Field(
        default=64, ge=0, description="largest size of the answer cache in the store, in MB; 0: no answer is kept"
    )
    allowed_hosts: Annotated[list[str] | None, NoDecode] = Field(
        default=None,
        description="host names by which clients may call a server without API keys, besides localhost and the address "
        "that it listens on; *.example.com: all below; *: all",
    )
    trusted_proxies: Annotated[list[str] | None, NoDecode] = Field(
        default=None,
        description="addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed",
    )
    max_connections: int | None = Field(
        default=None, ge=1, description="most connections at once; unset: what the limit of descriptors allows"
    )
    max_connections_per_address: int | None = Field(
        default=None,
        ge=1,
        description="most connections of one address that is no trusted proxy; unset: three quarters of all",
    )
    console: bool = Field(default=True, description="/ is a page for browsers that shows and tries the server")
    private_docs: bool = Field(
        default=False, description="/openapi.json and /metrics need an API key, and there is no /docs"
    )
    ssl_certfile: Path | None = Field(
        default=None, description="PEM file with the server's certificate and its chain; set: serve HTTPS only"
    )
    ssl_keyfile: Path | None = Field(
        default=None, description="PEM file with the certificate's key; unset: it is in --ssl-certfile"
    )
    files_url: str | None = Field(
        default=None,
        description="where files, inputs and results of batches lie, for all gateways: s3://bucket/prefix, gs://…, or "
        "another URL of fsspec; file:///mnt/shared: a shared file system; unset: --data-dir",
    )
    disk_reserve_mb: int = Field(
        default=512,
        ge=0,
        description="space on the disk of the data directory that uploads and batches leave free, in MB",
    )
    files_quota_mb: int | None = Field(
        default=None,
        ge=1,
        description="size of all files of an API key without a quota of its own, in MB; unset: no limit",
    )
    batch_max_lines: int = Field(default=100_000, ge=1, le=1_000_000, description="most requests that a batch may have")
    batch_max_unfinished: int = Field(
        default=200, ge=1, description="most batches of an API key (without keys: of all) that are not over"
    )
    max_body_mb: int = Field(default=16, ge=1, description="largest JSON body of a request, in MB")
    response_ttl_s: float = Field(
        default=86_400.0,
        ge=0,
        description="seconds for which stored responses are kept after their last use; 0: none are stored",
    )
    task_ttl_s: float = Field(
        default=3600.0, gt=0, description="seconds for which the result of a task of /v1/tasks is kept"
    )
    task_timeout_s: float = Field(
        default=86_400.0, gt=0, description="seconds that a task may wait, unless its `timeout_s` says otherwise"
    )
    tasks_quota_mb: int = Field(
        default=1024,
        ge=1,
        description="size of the waiting and running tasks of an API key (without keys: of all), in MB",
    )
    response_store_mb: int = Field(
        default=256,
        ge=1,
        description="size of all stored responses, in MB; beyond it, the key that has the most loses the oldest",
    )
    webhook_secret: SecretStr | None = Field(
        default=None,
        description="whsec_… that signs the webhooks of keys without a secret of their own; better set as "
        "TIDEGATE_WEBHOOK_SECRET; unset: only keys with one have webhooks",
    )
    webhook_allow_private: bool = Field(
        default=False, description="webhooks may call private and link-local addresses, also by http"
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        default="model",
        description="for what a request leaves out; model: its generation_config.json, openai: temperature 1",
    )
    trust_request_chat_template: bool = Field(
        default=False,
        description="whether a request may bring its own chat template, a program that may run for ever",
    )
    tool_parser: str = Field(
        default="auto",
        description="how the model writes tool calls, as docs/api.md lists it; auto: as its chat template shows",
    )

    @field_validator("webhook_secret")
    @classmethod
    def _signs(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            secret_bytes(value.get_secret_value())
        return value

    @field_validator("tool_parser")
    @classmethod
    def _known_parser(cls, value: str) -> str:
        if value not in ("auto", *CALL_FORMAT_NAMES):
            raise ValueError(f"must be auto, {', '.join(CALL_FORMAT_NAMES)}")
        return value

    @field_validator("api_keys")
    @classmethod
    def _is_no_key(cls, path: Path | None) -> Path | None:
        if path is not None and path.name.startswith("sk-") and not path.exists():
            raise ValueError("this is the name of a file; a key itself is set as TIDEGATE_API_KEY")
        return path

    @field_validator("ssl_keyfile")
    @classmethod
    def _has_certificate(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and info.data.get("ssl_certfile") is None:
            raise ValueError("a key needs the certificate of --ssl-certfile")
        return path

    @property
    def root_url(self) -> str:
        """The address at which the server answers, without a path."""
        return self._url_of(self.host)

    @property
    def console_url(self) -> str:
        """The address of the console for a browser on this machine, to which /admin is open also without API keys."""
        return self._url_of("localhost" if self.host in ("0.0.0.0", "::") else self.host) + "/"

    def _url_of(self, host: str) -> str:
        bracketed = f"[{host}]" if ":" in host else host
        return f"{'https' if self.ssl_certfile else 'http'}://{bracketed}:{self.port}"

    @property
    def operator_keys(self) -> list[str]:
        secrets = self.api_key.get_secret_value() if self.api_key is not None else ""
        return [secret.strip() for secret in secrets.split(",") if secret.strip()]

    @property
    def secret_env(self) -> dict[str, str]:
        own = {KEY_VARIABLE: self.api_key, WEBHOOK_VARIABLE: self.webhook_secret}
        return super().secret_env | {n: secret.get_secret_value() for n, secret in own.items() if secret is not None}

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, value: list[str] | None) -> list[str] | None:
        for entry in value or ():
            if not re.fullmatch(ORIGIN, entry):
                raise ValueError(f"{entry!r} is no origin: it needs a scheme and no path, such as https://chat.example")
        return value

    @field_validator("allowed_hosts", "allowed_origins", "trusted_proxies", mode="before")
    @classmethod
    def _split_items(cls, value: Any) -> Any:
        return split_list(value)

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: list[str] | None) -> list[str] | None:
        for entry in value or ():
            ip_network(entry, strict=False)  # raises ValueError with a sentence about the entry
        return value


class ServeSettings(GatewaySettings, WorkerSettings):
    """Run a store, a worker and a gateway on this machine."""


class DoctorSettings(ServeSettings):
    """Check whether this machine can run `tidegate serve` with the same flags, and say what to do."""

    trial: bool = Field(default=False, description="also start the engine: load the weights and try its kernels")


class DemoSettings(CommonSettings):
    """Start everything, ask questions, and measure chat alone and beside bulk requests."""

    seconds: float = Field(default=30.0, gt=0, le=600, description="seconds of bulk requests beside chat")


def check_file(path: Path) -> None:
    """Raise `SettingsError` if the file cannot be read, or if it has a key that no command has.

    Otherwise, a misspelt key would go unnoticed.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {error}") from error
    known = (set(ServeSettings.model_fields) | set(DemoSettings.model_fields)) - {"config"}
    unknown = sorted(set(data or {}) - known) if isinstance(data, dict | None) else ["(not a mapping)"]
    if unknown:
        raise SettingsError(f"{path}: unknown key {', '.join(unknown)}")
