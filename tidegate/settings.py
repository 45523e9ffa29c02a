"""What can be set, for each command: by flag, by environment (`TIDEGATE_*`), or in a YAML file; in that order.

Knows names, types and defaults; starts nothing. The tiers have a file of their own (`scheduler.config`).
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from demo_model.location import demo_model_path

CONFIG_VARIABLE = "TIDEGATE_CONFIG"
STORE_VARIABLE = "TIDEGATE_REDIS_URL"
DEMO_MODEL = "tidegate-demo"


class SettingsError(Exception):
    """The settings cannot be used; the message is for the operator."""


def shipped_tiers() -> Path:
    """The default tiers.yaml: beside this file in an installed wheel, at the top of a source tree."""
    here = Path(__file__).resolve().parent
    installed = here / "tiers.yaml"
    return installed if installed.exists() else here.parent / "tiers.yaml"


class CommonSettings(BaseSettings):
    """What every part needs."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEGATE_",
        env_ignore_empty=True,  # compose files pass variables on that nobody has set
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_parse_none_str="unset",
        protected_namespaces=(),
    )

    config: Path | None = Field(default=None, description="YAML file with settings; a flag or a variable wins over it")
    model: str | None = Field(default=None, description="transformers directory or hub id; unset: the demo model")
    served_model_name: Annotated[list[str] | None, NoDecode] = Field(
        default=None, description="name or names that clients use; unset: the model's"
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="dummy: random weights in the shape of the model's config, for benchmarks"
    )
    tiers: Path | None = Field(default=None, description="the tiers file; unset: the shipped tiers.yaml")
    redis_url: str | None = Field(
        default=None, description="redis://… or unix://…; unset: `serve` runs a Valkey of its own"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    drain_s: float = Field(default=30.0, ge=0, description="how long running requests may take to end on a stop")

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        parts = [value] if isinstance(value, str) else value or []
        return [name.strip() for part in parts for name in str(part).split(",") if name.strip()] or None

    @property
    def model_path(self) -> str:
        return self.model or str(demo_model_path())

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients call the model; the first is the main one."""
        if self.served_model_name:
            return tuple(self.served_model_name)
        return (self.model.rstrip("/").rsplit("/", 1)[-1],) if self.model else (DEMO_MODEL,)

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
        """For a child's environment: the store's URL may hold a password, and everybody can read command lines."""
        return {STORE_VARIABLE: self.redis_url} if self.redis_url else {}

    def flags(self, kind: "type[CommonSettings]") -> tuple[str, ...]:
        """Those of these settings that `kind` knows, as command line flags for a child process; without what is in
        `secret_env`."""
        flags: list[str] = []
        for name in kind.model_fields:
            value = getattr(self, name)
            if value is None or name == "redis_url":
                continue
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", ",".join(value) if isinstance(value, list) else str(value)]
        return tuple(flags)


class WorkerSettings(CommonSettings):
    """The engine and its scheduler: `tidegate worker`."""

    worker_id: str | None = Field(
        default=None, description="unique among the store's workers; unset: host name and process id (serve: port)"
    )
    device: str = Field(default="auto", description="cpu, cuda, cuda:1 …; auto: CUDA where there is one")
    dtype: str = Field(default="auto", description="float32, bfloat16, float16; auto: bfloat16 where it is fast")
    max_model_len: int | None = Field(default=None, ge=2, description="tokens of prompt and output together")
    max_step_tokens: int = Field(default=2048, ge=16, description="most tokens in one step")
    kv_cache_mb: int | None = Field(default=None, ge=1, description="memory for the KV cache; unset: from what is free")
    swap_mb: int | None = Field(
        default=None,
        ge=0,
        description="host memory for the KV of preempted sequences; unset: up to 4 GiB with CUDA, none without",
    )
    prefix_cache: bool = Field(default=True, description="keep KV of prompt beginnings for those who share them")
    cuda_graphs: bool = Field(default=True, description="run decode steps as captured graphs, on a GPU")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of the engine")
    optimize: bool = Field(default=True, description="faster layers where a trial shows that they compute the same")
    step_log: Path | None = Field(
        default=None, description="append each step's work and time to this file, at most 1 GB; for loadtest calibrate"
    )


class GatewaySettings(CommonSettings):
    """The HTTP side: `tidegate gateway`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    data_dir: Path = Field(default=Path("data"), description="files, batches and the embedded Valkey's data")
    api_keys: Path | None = Field(default=None, description="YAML file with keys and their tiers; unset: open access")
    max_body_mb: int = Field(default=16, ge=1, description="largest JSON body")
    sampling_defaults: Literal["model", "openai"] = Field(
        default="model",
        description="where a request names none; model: what its generation_config.json says, openai: temperature 1",
    )


class ServeSettings(GatewaySettings, WorkerSettings):
    """Everything on one machine: `tidegate serve`."""


class DemoSettings(CommonSettings):
    """`tidegate demo`."""

    seconds: float = Field(default=30.0, gt=0, le=600, description="how long bulk runs beside chat")


def check_file(path: Path) -> None:
    """Refuse a settings file with a key that no command knows: it would be ignored in silence."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {error}") from error
    known = (set(ServeSettings.model_fields) | set(DemoSettings.model_fields)) - {"config"}
    unknown = sorted(set(data or {}) - known) if isinstance(data, dict | None) else ["(not a mapping)"]
    if unknown:
        raise SettingsError(f"{path}: unknown key {', '.join(unknown)}")
