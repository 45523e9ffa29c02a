"""The settings of each command: from flags, environment variables (`TIDEGATE_*`) or a YAML file.

Flags override environment variables, and both override the file. Knows names, types and defaults; starts nothing. The
tiers have a file of their own (`scheduler.config`).
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from demo_model.location import demo_model_path
from engine.interface import ModelKind
from scheduler.config import shipped_tiers_path
from tidegate.settings.models import named_models

CONFIG_VARIABLE = "TIDEGATE_CONFIG"
STORE_VARIABLE = "TIDEGATE_REDIS_URL"
# Settings that a child process gets in its environment: command lines are visible to all users of the machine. The
# store's URL may hold a password.
SECRETS = ("redis_url", "api_key", "upstream_api_key", "webhook_secret", "oidc_client_secret")
DEMO_MODEL = "tidegate-demo"


class SettingsError(Exception):
    """The settings cannot be used. The message is for the operator."""


def split_list(value: Any) -> list[str] | None:
    """Return the items of a setting that is a list or a text with commas; None if there are none."""
    parts = [value] if isinstance(value, str) else value or []
    return [item.strip() for part in parts for item in str(part).split(",") if item.strip()] or None


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
    model: str | None = Field(
        default=None,
        description="transformers model directory, hub id or GGUF file; unset: the demo model; NAME=PATH: one of "
        "several models, with queues of its own (serve and gateway: several, with commas)",
    )
    kind: ModelKind | None = Field(
        default=None,
        description="what the model is for: chat, embedding or rerank; unset: what its files say",
    )
    image_tokens: int = Field(
        default=0,
        ge=0,
        le=2**16,
        description="with --engine openai: chats may have images, which count as so many tokens each until the server "
        "says how many they are; 0: no images",
    )
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
        default=None,
        description="redis://…, redis+sentinel://HOST,HOST/SERVICE, redis+cluster://HOST,HOST (one primary of it "
        "serves this deployment), all with rediss for TLS, or unix://…; with ?password_file=PATH, ?password_command=… "
        "or ?deployment=NAME; unset: `serve` starts its own Valkey",
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

    @field_validator("redis_url")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            from scheduler.store import address  # takes a tenth of a second, and not every command needs it

            address.parse(value)  # raises ValueError
        return value

    @model_validator(mode="after")
    def _has_names_once(self) -> Self:
        if named_models(self.model) and (self.served_model_name or self.adapters):
            raise ValueError("a model of --model NAME=PATH has this name only; --models FILE has aliases")
        return self

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
        return next(iter(self.named_models.values()), os.path.expanduser(self.model or "")) or str(demo_model_path())

    @property
    def named_models(self) -> dict[str, str]:
        """The models that have queues of their own, from name to path; empty for one model that has none."""
        return named_models(self.model)

    @property
    def store_url(self) -> str:
        """The store of the model's queues and workers."""
        from scheduler.store import address

        url = str(self.redis_url)
        return address.of_model(url, self.base_names[0]) if self.named_models else url

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients use for the model and its adapters. The first one is the main name."""
        return (*self.base_names, *self.adapter_paths)

    @property
    def base_names(self) -> list[str]:
        """The names of the model itself."""
        if self.named_models:
            return list(self.named_models)
        own = self.model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf") if self.model else DEMO_MODEL
        return self.served_model_name or [own]

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The directories or hub ids of the LoRA adapters, by name."""
        return {name: path for name, _, path in (entry.partition("=") for entry in self.adapters or ())}

    @property
    def tiers_path(self) -> Path:
        return self.tiers or shipped_tiers_path()

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
        """The variables of `SECRETS` for the environment of a child process."""
        values = {name: getattr(self, name, None) for name in SECRETS}
        texts = {n: v.get_secret_value() if isinstance(v, SecretStr) else v for n, v in values.items()}
        return {f"TIDEGATE_{name.upper()}": text for name, text in texts.items() if text}

    def flags(self, kind: "type[CommonSettings]") -> tuple[str, ...]:
        """Return these settings as command line flags for a child process that reads the settings `kind`.

        Settings that `kind` does not have, and `SECRETS`, are left out.
        """
        flags: list[str] = []
        for name in kind.model_fields:
            value = getattr(self, name)
            if value is None or name in SECRETS:
                continue
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", ",".join(value) if isinstance(value, list) else str(value)]
        return tuple(flags)
