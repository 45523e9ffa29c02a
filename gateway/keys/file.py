"""The file of API keys: what it may contain, and how it is read.

Knows YAML and tiers; does not know HTTP, or when the file is read again (gateway/keys/source.py does). The file has the
form `keys: [{name, key | sha256, tiers?, default_tier?, role?, requests_per_minute?, …}]`.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.identity import ApiKey, KeyWebhook
from gateway.keys.webhooks import secret_bytes, url_fault
from gateway.protocol.bodies.validation import first_fault
from scheduler.config import TierSet

ID_DIGITS = 8  # hex digits of the digest that name one key in lists; enough to tell thousands of keys apart

Limit = Annotated[int, Field(ge=1, le=2**40)]


class KeyringError(Exception):
    """The API keys cannot be used. The message names the file and the key."""


class WebhookEntry(BaseModel):
    """The webhook of a key. Which addresses it may reach is decided when it is called."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    secret: str
    url: str | None = None

    @field_validator("secret")
    @classmethod
    def _is_secret(cls, value: str) -> str:
        secret_bytes(value)
        return value

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and (fault := url_fault(value)):
            raise ValueError(fault)
        return value


class KeyEntry(BaseModel):
    """One key of the file. Entries of the same name are several secrets of one key, and agree in all other fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1, max_length=128)
    key: Annotated[str, Field(min_length=1)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    tiers: Annotated[list[str], Field(min_length=1)] | None = None
    default_tier: str | None = None
    admin: bool = False  # the role admin, as older files say it
    role: Literal["read", "operate", "admin"] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    files_quota_mb: Limit | None = None
    # Older files call it `batch_weight`.
    weight: Annotated[int, Field(ge=1, le=1000, validation_alias=AliasChoices("weight", "batch_weight"))] = 1
    batch_concurrent_lines: Limit | None = None
    batch_enqueued_tokens: Limit | None = None
    webhook: WebhookEntry | None = None

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either key or sha256")
        return self

    @model_validator(mode="after")
    def _one_role(self) -> Self:
        if self.admin and self.role not in (None, "admin"):
            raise ValueError(f"admin: true is the role admin, and role says {self.role}")
        return self

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 else hashlib.sha256((self.key or "").encode()).digest()

    @property
    def id(self) -> str:
        return self.digest.hex()[:ID_DIGITS]

    @property
    def options(self) -> dict[str, Any]:
        """The fields that are set, without the secret."""
        return self.model_dump(exclude={"key", "sha256"}, exclude_defaults=True)

    def to_key(self) -> ApiKey:
        webhook = None if self.webhook is None else KeyWebhook(self.webhook.secret, self.webhook.url)
        tiers = frozenset(self.tiers) if self.tiers else None
        options = self.options | {"tiers": tiers, "webhook": webhook, "role": "admin" if self.admin else self.role}
        options.pop("admin", None)
        return ApiKey(sha256=self.digest, **options)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys: list[KeyEntry]


def read_entries(path: Path, tiers: TierSet | None = None) -> list[KeyEntry]:
    """Return the keys of the YAML file `path`.

    Raises `KeyringError` if the file is invalid, or names a tier that is not in `tiers` (None: tiers are not checked).
    """
    try:
        return parse_entries(path, path.read_text(encoding="utf-8"), tiers)
    except OSError as error:
        raise KeyringError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyringError(f"{path}: not UTF-8") from error


def parse_entries(path: Path, text: str, tiers: TierSet | None = None) -> list[KeyEntry]:
    """Return the keys in `text`, the content of `path`. Raises the errors of `read_entries`."""
    try:
        content = yaml.safe_load(text)
        if not isinstance(content, dict):
            raise KeyringError(f"{path}: must have the form `keys: [{{name: …, sha256: …}}, …]`")
        entries = _File.model_validate(content).keys
    except yaml.YAMLError as error:
        raise KeyringError(f"{path}: not YAML") from error
    except ValidationError as error:
        raise KeyringError(f"{path}: {first_fault(error.errors(include_url=False)).message}") from None
    _check_names(path, entries)
    for entry in entries:
        _check_tiers(path, entry, tiers)
    return entries


def _check_names(path: Path, entries: Sequence[KeyEntry]) -> None:
    first: dict[str, KeyEntry] = {}
    for entry in entries:
        if first.setdefault(entry.name, entry).options != entry.options:
            raise KeyringError(f"{path}: key {entry.name!r}: its entries differ in more than the secret")
    if len({entry.digest for entry in entries}) < len(entries):
        raise KeyringError(f"{path}: two entries have the same secret")


def _check_tiers(path: Path, entry: KeyEntry, tiers: TierSet | None) -> None:
    for name in (*(entry.tiers or ()), *((entry.default_tier,) if entry.default_tier else ())):
        if tiers is not None and name not in tiers.tiers:
            raise KeyringError(f"{path}: key {entry.name!r}: there is no tier {name!r}")
    if entry.tiers and entry.default_tier and entry.default_tier not in entry.tiers:
        raise KeyringError(f"{path}: key {entry.name!r}: default_tier is not among its tiers")
