"""API keys, and the translation between OpenAI's `service_tier` and the tiers of tiers.yaml.

Does not know bodies or queues. A keyring holds only the SHA-256 digests of keys, and compares them in constant time.
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

REQUEST_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")  # the openai client may send these
RESPONSE_SERVICE_TIERS = ("default", "flex", "scale", "priority")  # the openai client's response types accept these


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The API key of a caller.

    `tiers` are the tiers that the key may use (None: all tiers). `default_tier` is the tier of requests without a
    `service_tier` (None: the default tier of tiers.yaml). `admin` says whether the key may use /admin.
    """

    name: str
    sha256: bytes
    tiers: frozenset[str] | None = None
    default_tier: str | None = None
    admin: bool = False

    def may_use(self, tier: Tier) -> bool:
        return self.tiers is None or tier.name in self.tiers


class Keyring:
    """The configured API keys. If there are none, access is open, and a key in a request is ignored."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    @property
    def is_open(self) -> bool:
        return not self._keys

    def objection(self, tiers: TierSet) -> str:
        """Return a sentence about the first key that names a tier missing in `tiers`.

        Return an empty string if there is no such key.
        """
        for key in self._keys:
            named = (key.tiers or frozenset()) | ({key.default_tier} if key.default_tier else set())
            if missing := sorted(named - set(tiers.tiers)):
                return f"The API key {key.name!r} names the tier {missing[0]!r}."
        return ""

    def authenticate(self, authorization: str | None) -> ApiKey | None:
        """Return the configured key that an `Authorization` header contains; None if access is open.

        Raises `ApiError` 401 if the header contains no configured key.
        """
        if self.is_open:
            return None
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        found: ApiKey | None = None
        for key in self._keys:  # always compares all keys, so that the time taken does not tell which key matched
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None or scheme.lower() != "bearer":
            raise invalid_api_key()
        return found


@dataclass(frozen=True, slots=True)
class ResolvedTier:
    """The tier that serves a request, and the `service_tier` that its answer reports."""

    tier: Tier
    service_tier: str


def resolve_tier(service_tier: str | None, key: ApiKey | None, tiers: TierSet) -> ResolvedTier:
    """Return the tier that `service_tier` requests.

    If `key` may not use this tier, return the highest tier that `key` may use. Raises `ApiError` 400 if `service_tier`
    is unknown.
    """
    tier = _requested_tier(service_tier, key, tiers)
    if key is not None and not key.may_use(tier):
        tier = next(t for t in tiers.by_priority if key.may_use(t))
    reported = "priority" if service_tier == "fast" else service_tier
    if reported in RESPONSE_SERVICE_TIERS and tier is tiers.for_service_tier(service_tier or ""):
        return ResolvedTier(tier, reported)
    return ResolvedTier(tier, service_tier_of(tier))


def demotion_of(tier: Tier, key: ApiKey | None, tiers: TierSet) -> ResolvedTier | None:
    """Return the lower tier that serves requests which `tier` cannot serve in time.

    None if `tier` has no such lower tier, or if `key` may not use the lower tier.
    """
    lower = tiers.tiers.get(tier.admission.demote_to or "")
    if lower is None or (key is not None and not key.may_use(lower)):
        return None
    return ResolvedTier(lower, service_tier_of(lower))


def patient_service_tier(tier: Tier, key: ApiKey | None, tiers: TierSet) -> str | None:
    """Return a `service_tier` with which requests wait their turn where `tier` rejects them.

    It means the highest bulk tier below `tier` that has a `service_tier` and that `key` may use; None if there is none.
    """
    below = (t for t in tiers.by_priority if t.priority < tier.priority and not t.is_interactive)
    usable = (t for t in below if t.service_tiers and (key is None or key.may_use(t)))
    return next((t.service_tiers[0] for t in usable), None)


def service_tier_of(tier: Tier) -> str:
    """Return the `service_tier` that an answer of `tier` reports if the request did not ask for this tier by name."""
    named = next((name for name in tier.service_tiers if name in RESPONSE_SERVICE_TIERS), None)
    return named or tier.answers_as or "default"


def _requested_tier(service_tier: str | None, key: ApiKey | None, tiers: TierSet) -> Tier:
    own = key.default_tier if key is not None else None
    fallback = tiers[own or tiers.default_tier]
    if service_tier in (None, "auto"):
        return fallback
    tier = tiers.for_service_tier(service_tier)
    if tier is None and service_tier not in REQUEST_SERVICE_TIERS:
        known = dict.fromkeys(
            (*REQUEST_SERVICE_TIERS, *(name for t in tiers.tiers.values() for name in t.service_tiers))
        )
        raise invalid_value("service_tier", f"Invalid value for 'service_tier': must be one of {', '.join(known)}.")
    return tier or fallback


def cache_salt(owner: str | None, requested: str | None) -> str:
    """Return the prefix cache salt of a request. Requests share the KV of a common prefix only within one salt.

    Requests with different API keys never have the same salt, because the TTFT would reveal to one caller which
    prefixes another caller has used. `owner` is the key's name (None: access is open). `requested` is the `cache_salt`
    in the request's body.
    """
    return json.dumps((owner, requested))


class KeyringError(Exception):
    """The file of API keys cannot be used. The message names the file and the key."""


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
    """Return the keyring that is read from the YAML file `path`.

    The file has the form `keys: [{name, key | sha256, tiers?, default_tier?, admin?}]`. Raises `KeyringError` if the
    file is invalid or names a tier that is not in `tiers`.
    """
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
