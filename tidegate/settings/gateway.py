"""The settings of a gateway."""

import re
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode

from gateway.http.access.sign_in import RoleRule, SignIn
from gateway.keys.webhooks import secret_bytes
from gateway.output.tools.formats import CALL_FORMAT_NAMES
from tidegate.settings.base import CommonSettings, split_list
from tidegate.settings.models import ModelEntry, ModelsFile, read_models

# An entry of `allowed_origins`. Desktop apps have schemes of their own, some of them without a host (`file://`).
ORIGIN = r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]*/?"


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
        default=86_400,
        ge=0,
        description="the longest time that a request may keep its answer in the answer cache; 0: no answer is kept",
    )
    store_mb: int = Field(
        default=4096,
        ge=64,
        description="memory of the store for what clients send, in MB: a quarter for waiting requests of interactive "
        "tiers, a quarter for those of bulk tiers, a quarter for the tasks of a key, 1/16 for stored responses, 1/64 "
        "for cached answers; the embedded store takes at most twice as much",
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
    metrics_of: Annotated[list[str] | None, NoDecode] = Field(
        default=None,
        description="ids of workers on this machine whose metrics /metrics shows beside the gateway's own; unset: none "
        "(serve: its worker)",
    )
    models: Path | None = Field(
        default=None,
        description="YAML file with several models, their kinds, aliases, tiers files, fallbacks and splits; a worker "
        "of one has --model NAME=PATH; unset: one model, or those of --model",
    )
    scale_from_zero: bool = Field(
        default=False,
        description="workers come on demand, such as by KEDA: without one, requests wait for as long as their "
        "tier's patience, bulk waits in the store, and /ready is 200",
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
    oidc_issuer: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="URL of the OpenID provider with which people sign in to the console; needs API keys as well; "
        "unset: they enter a key",
    )
    oidc_client_id: str | None = Field(default=None, description="the server's name at the provider")
    oidc_client_secret: SecretStr | None = Field(
        default=None,
        description="the server's secret at the provider, the same for all gateways; better set as "
        "TIDEGATE_OIDC_CLIENT_SECRET",
    )
    oidc_roles: Annotated[list[str] | None, NoDecode] = Field(
        default=None,
        description="who has which role, as CLAIM=VALUE:ROLE of the ID token, such as groups=sre:admin; others may not "
        "sign in",
    )
    oidc_scopes: str = Field(default="openid profile email", description="what the provider is asked for")
    store_replicas: int = Field(
        default=0,
        ge=0,
        description="replicas of the store that must have a batch, file or background response before it is "
        "acknowledged; then no failover to one of them loses it",
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
    batch_ttl_s: int = Field(
        default=30 * 86_400,
        ge=3600,
        description="seconds for which inputs of batches that set no expiry, and records of ended batches, are kept",
    )
    file_ttl_s: int | None = Field(
        default=None,
        ge=3600,
        description="seconds for which other files that set no expiry are kept, also results of batches; unset: until "
        "they are deleted",
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

    @field_validator("oidc_roles")
    @classmethod
    def _are_rules(cls, value: list[str] | None) -> list[str] | None:
        for text in value or ():
            RoleRule.parse(text)
        return value

    @model_validator(mode="after")
    def _can_sign_in(self) -> Self:
        """Check the settings of signing in. The cookie is worth a key, so there must be keys that it stands for."""
        if self.oidc_issuer is not None and find_spec("authlib") is None:
            raise ValueError("--oidc-issuer needs Authlib: pip install 'tidegate[oidc]'")
        needed = (self.oidc_client_id, self.oidc_client_secret, self.oidc_roles)
        if self.oidc_issuer is not None and not all(needed):
            raise ValueError("--oidc-issuer needs --oidc-client-id, TIDEGATE_OIDC_CLIENT_SECRET and --oidc-roles")
        if self.oidc_issuer is not None and self.api_keys is None and not self.operator_keys:
            raise ValueError("--oidc-issuer needs --api-keys or TIDEGATE_API_KEY: without them, access is open")
        return self

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

    @field_validator("store_replicas")
    @classmethod
    def _has_replicas(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("redis_url") is None:
            raise ValueError("the embedded store has no replicas; use a store of yours with --redis-url")
        return value

    @field_validator("models")
    @classmethod
    def _is_the_only_list(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        for name in ("model", "kind", "image_tokens"):
            if value is not None and info.data.get(name):
                raise ValueError(f"the file of --models says it of each model, in place of --{name.replace('_', '-')}")
        return value

    @field_validator("ssl_keyfile")
    @classmethod
    def _has_certificate(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and info.data.get("ssl_certfile") is None:
            raise ValueError("a key needs the certificate of --ssl-certfile")
        return path

    def several_models(self) -> ModelsFile | None:
        """Return the models that have queues of their own; None for one model that has none. Raises `ModelsError`."""
        if self.models is not None:
            return read_models(self.models)
        entries = {name: self.entry_of(path) for name, path in self.named_models.items()}
        return ModelsFile(models=entries) if entries else None

    def entry_of(self, path: str) -> ModelEntry:
        return ModelEntry(path=path, kind=self.kind, image_tokens=self.image_tokens)

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
    def sign_in(self) -> SignIn | None:
        secret = self.oidc_client_secret
        if self.oidc_issuer is None or self.oidc_client_id is None or secret is None:
            return None
        rules = [RoleRule.parse(text) for text in self.oidc_roles or ()]
        return SignIn(self.oidc_issuer, self.oidc_client_id, secret.get_secret_value(), self.oidc_scopes, rules)

    @property
    def operator_keys(self) -> list[str]:
        secrets = self.api_key.get_secret_value() if self.api_key is not None else ""
        return [secret.strip() for secret in secrets.split(",") if secret.strip()]

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, value: list[str] | None) -> list[str] | None:
        for entry in value or ():
            if not re.fullmatch(ORIGIN, entry):
                raise ValueError(f"{entry!r} is no origin: it needs a scheme and no path, such as https://chat.example")
        return value

    @field_validator("allowed_hosts", "allowed_origins", "metrics_of", "oidc_roles", "trusted_proxies", mode="before")
    @classmethod
    def _split_items(cls, value: Any) -> Any:
        return split_list(value)

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: list[str] | None) -> list[str] | None:
        for entry in value or ():
            ip_network(entry, strict=False)  # raises ValueError with a sentence about the entry
        return value
