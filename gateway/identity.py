"""Who asks, and therefore which tier serves: API keys, and `service_tier` to tier and back.

Knows keys, tiers.yaml's names and OpenAI's `service_tier` values. Knows neither bodies nor queues. Keys are
held as SHA-256 digests only and compared in constant time.
"""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.protocol.errors import invalid_api_key, invalid_value
from gateway.protocol.validation import first_fault
from scheduler.config import Tier, TierSet

ASKABLE = ("auto", "default", "flex", "scale", "priority", "fast")  # what the openai client may send
ANSWERABLE = ("default", "flex", "scale", "priority")  # what its response types accept


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A caller. `tiers`: what it may use, None for all; `default_tier`: where it goes when it asks for nothing;
    `admin`: may change the tiers of all."""

    name: str
    sha256: bytes
    tiers: frozenset[str] | None = None
    default_tier: str | None = None
    admin: bool = False

    def may_use(self, tier: Tier) -> bool:
        return self.tiers is None or tier.name in self.tiers


class Keyring:
    """The configured keys. None configured: everybody may come in, and a presented key means nothing."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    @property
    def is_open(self) -> bool:
        return not self._keys

    def objection(self, tiers: TierSet) -> str:
        """A sentence about the first key that names a tier which is not among `tiers`; empty: there is none."""
        for key in self._keys:
            named = (key.tiers or frozenset()) | ({key.default_tier} if key.default_tier else set())
            if missing := sorted(named - set(tiers.tiers)):
                return f"The API key {key.name!r} names the tier {missing[0]!r}."
        return ""

    def authenticate(self, authorization: str | None) -> ApiKey | None:
        """The caller behind an `Authorization` header; None where access is open. Raises `ApiError` 401."""
        if self.is_open:
            return None
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        found: ApiKey | None = None
        for key in self._keys:  # always all of them: the time taken says nothing about which one matched
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None or scheme.lower() != "bearer":
            raise invalid_api_key()
        return found


@dataclass(frozen=True, slots=True)
class ResolvedTier:
    """The tier that serves, and the `service_tier` that the answer reports."""

    tier: Tier
    answer: str


def resolve_tier(service_tier: str | None, key: ApiKey | None, tiers: TierSet) -> ResolvedTier:
    """The tier asked for, clamped to what `key` may use. Raises `ApiError` 400 for an unknown value."""
    asked = _asked_tier(service_tier, key, tiers)
    tier = asked
    if key is not None and not key.may_use(asked):
        tier = next(t for t in tiers.by_priority if key.may_use(t))
    wish = "priority" if service_tier == "fast" else service_tier
    if wish in ANSWERABLE and tier is tiers.for_service_tier(service_tier or ""):
        return ResolvedTier(tier, wish)
    return ResolvedTier(tier, answer_of(tier))


def demotion_of(tier: Tier, key: ApiKey | None, tiers: TierSet) -> ResolvedTier | None:
    """Where `tier` may send what it cannot serve in time, if `key` may go there."""
    lower = tiers.tiers.get(tier.admission.demote_to or "")
    if lower is None or (key is not None and not key.may_use(lower)):
        return None
    return ResolvedTier(lower, answer_of(lower))


def answer_of(tier: Tier) -> str:
    """The `service_tier` by which answers of `tier` go when the asked one says nothing about it."""
    named = next((name for name in tier.service_tiers if name in ANSWERABLE), None)
    return named or tier.answers_as or "default"


def _asked_tier(service_tier: str | None, key: ApiKey | None, tiers: TierSet) -> Tier:
    own = key.default_tier if key is not None else None
    fallback = tiers[own or tiers.default_tier]
    if service_tier in (None, "auto"):
        return fallback
    tier = tiers.for_service_tier(service_tier)
    if tier is None and service_tier not in ASKABLE:
        known = dict.fromkeys((*ASKABLE, *(name for t in tiers.tiers.values() for name in t.service_tiers)))
        raise invalid_value("service_tier", f"Invalid value for 'service_tier': must be one of {', '.join(known)}.")
    return tier or fallback


def cache_salt(owner: str | None, wish: str | None) -> str:
    """Requests of the same one may share the KV of equal prompt beginnings, and could time that they do: so those of
    two keys never are. `owner`: the key's name, None where access is open; `wish`: the body's own `cache_salt`."""
    return json.dumps((owner, wish))


class KeyringError(Exception):
    """The file of API keys cannot be used; the message names file and key."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1)
    key: Annotated[str, Field(min_length=1)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    tiers: Annotated[list[str], Field(min_length=1)] | None = None
    default_tier: str | None = None
    admin: bool = False

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either key or sha256")
        return self

    def to_key(self) -> ApiKey:
        digest = bytes.fromhex(self.sha256) if self.sha256 else hashlib.sha256((self.key or "").encode()).digest()
        tiers = frozenset(self.tiers) if self.tiers else None
        return ApiKey(self.name, digest, tiers, self.default_tier, self.admin)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys: list[_Entry] = Field(min_length=1)


def load_keyring(path: Path, tiers: TierSet) -> Keyring:
    """Read `keys: [{name, key | sha256, tiers?, default_tier?, admin?}]`. Raises `KeyringError`."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        entries = _File.model_validate(data).keys
    except OSError as error:
        raise KeyringError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise KeyringError(f"{path}: not YAML") from error
    except ValidationError as error:
        raise KeyringError(f"{path}: {first_fault(error.errors(include_url=False)).message}") from None
    for entry in entries:
        _check_tiers(path, entry, tiers)
    return Keyring([entry.to_key() for entry in entries])


def _check_tiers(path: Path, entry: _Entry, tiers: TierSet) -> None:
    for name in (*(entry.tiers or ()), *((entry.default_tier,) if entry.default_tier else ())):
        if name not in tiers.tiers:
            raise KeyringError(f"{path}: key {entry.name!r}: there is no tier {name!r}")
    if entry.tiers and entry.default_tier and entry.default_tier not in entry.tiers:
        raise KeyringError(f"{path}: key {entry.name!r}: default_tier is not among its tiers")
