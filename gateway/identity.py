"""API keys, and the translation between OpenAI's `service_tier` and the tiers of tiers.yaml.

Does not know bodies, queues or where keys are configured (gateway/keys/ does). A keyring holds only the SHA-256 digests
of keys, and compares them in constant time. SHA-256 without a salt is right for keys that are random: a digest cannot
be inverted by guessing, which is what the slow hashes for passwords guard against.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.protocol.errors import invalid_api_key, invalid_value
from scheduler.config import Tier, TierSet

# Names that mean the same as another one, unless a tier has them.
ALIASES = {"fast": "priority", "ultrafast": "priority", "standard": "default"}
REQUEST_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", *ALIASES)  # the openai client may send these
RESPONSE_SERVICE_TIERS = ("default", "flex", "scale", "priority")  # the openai client's response types accept these
# What a key may do with /admin: look; retry and remove dead letters; change the tiers.
ROLES = ("read", "operate", "admin")
# Bytes of a digest by which a keyring finds the keys to compare with, so that its time does not grow with their number.
# How long this takes tells at most these bytes of the digest of what the caller has sent, which he knows anyway.
INDEX_BYTES = 4


@dataclass(frozen=True, slots=True)
class KeyWebhook:
    """Where the ends of a key's batches and background responses are reported, and the secret that signs the reports.

    `url` is for those whose metadata names no URL (None: only those that name one are reported).
    """

    secret: str
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be used in a UTC day and in a UTC month, of tokens and of money (None: no limit).

    Money is in the currency of the price list.
    """

    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    cost_per_day: float | None = None
    cost_per_month: float | None = None


@dataclass(frozen=True, slots=True)
class Project:
    """Several API keys that share limits, beside those that each of them has alone (None: no limit)."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    budget: Budget | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The API key of a caller.

    `tiers` are the tiers that the key may use (None: all tiers). `default_tier` is the tier of requests without a
    `service_tier` (None: the default tier of tiers.yaml). `role` says what the key may do with /admin (None: nothing).
    The next four are limits over all gateways (None: no limit). `files_quota_mb` is the size of all its files in MB
    (None: the server's default). `webhook` is None for the server's own secret, and no URL. `weight` is its share
    beside other keys, of an interactive tier and of the lines of batches. `batch_concurrent_lines` and
    `batch_enqueued_tokens` limit the lines of its batches that run at the same time on one gateway, and the prompt
    tokens of its unfinished batches (None: no limit). `project` is the project that it belongs to, if any.
    """

    name: str
    sha256: bytes
    tiers: frozenset[str] | None = None
    default_tier: str | None = None
    role: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    budget: Budget | None = None
    files_quota_mb: int | None = None
    webhook: KeyWebhook | None = None
    weight: int = 1
    batch_concurrent_lines: int | None = None
    batch_enqueued_tokens: int | None = None
    project: Project | None = None

    def may(self, role: str) -> bool:
        """Return whether the key may do with /admin what needs this role. Each role includes those before it."""
        return self.role is not None and ROLES.index(self.role) >= ROLES.index(role)

    def may_use(self, tier: Tier) -> bool:
        return self.tiers is None or tier.name in self.tiers

    @property
    def holders(self) -> "tuple[Holder, ...]":
        """The key and, if it has one, its project: a request of the key must keep the limits of both."""
        return (self,) if self.project is None else (self, self.project)

    @property
    def is_limited(self) -> bool:
        limits = [(h.requests_per_minute, h.tokens_per_minute, h.concurrent_requests, h.budget) for h in self.holders]
        return any(limit is not None for of_holder in limits for limit in of_holder)


Holder = ApiKey | Project  # of limits per minute, of open requests, and of a budget


class Keyring:
    """The API keys that are accepted now. If none are configured (`keys` is None), access is open.

    With open access, a key in a request is ignored. An empty sequence of keys lets nobody in.
    """

    def __init__(self, keys: Sequence[ApiKey] | None = None) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[ApiKey] | None) -> None:
        """Accept `keys` from now on, and no others. Requests under way go on."""
        self.is_open = keys is None
        self.keys = tuple(keys or ())
        self._by_name = {key.name: key for key in self.keys}
        self._by_digest: dict[bytes, list[ApiKey]] = {}
        for key in self.keys:
            self._by_digest.setdefault(key.sha256[:INDEX_BYTES], []).append(key)

    def named(self, name: str | None) -> ApiKey | None:
        """Return the key of this name. Keys of the same name differ only in their digests."""
        return None if name is None else self._by_name.get(name)

    def objection(self, tiers: TierSet) -> str:
        """Return a sentence about the first key that names a tier missing in `tiers`.

        Return an empty string if there is no such key.
        """
        for key in self.keys:
            named = (key.tiers or frozenset()) | ({key.default_tier} if key.default_tier else set())
            if missing := sorted(named - set(tiers.tiers)):
                return f"The API key {key.name!r} names the tier {missing[0]!r}."
        return ""

    def authenticate(self, authorization: str | None) -> ApiKey | None:
        """Return the configured key that an `Authorization` header contains; None if access is open.

        Raises `ApiError` 401 if the header contains no configured key.
        """
        key = self.find(authorization)
        if key is None and not self.is_open:
            raise invalid_api_key()
        return key

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the configured key that an `Authorization` header contains; None if there is none."""
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        for key in self._by_digest.get(digest[:INDEX_BYTES], ()):
            if hmac.compare_digest(key.sha256, digest) and scheme.lower() == "bearer":
                return key
        return None


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """Return the value of `Authorization`. A key in `x-api-key`, as of Anthropic's clients, counts as a Bearer's."""
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")


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
    reported = ALIASES.get(service_tier or "", service_tier)
    if tiers.for_service_tier(service_tier or "") is None:
        service_tier = reported
    tier = _requested_tier(service_tier, key, tiers)
    tier = _usable(tier, key, tiers)
    if reported in RESPONSE_SERVICE_TIERS and tier is tiers.for_service_tier(service_tier or ""):
        return ResolvedTier(tier, reported)
    return ResolvedTier(tier, service_tier_of(tier))


def resolve_named(tier: Tier, key: ApiKey | None, tiers: TierSet) -> ResolvedTier:
    """Return `tier`, or the highest tier that `key` may use if it may not use this one."""
    usable = _usable(tier, key, tiers)
    return ResolvedTier(usable, service_tier_of(usable))


def _usable(tier: Tier, key: ApiKey | None, tiers: TierSet) -> Tier:
    return tier if key is None or key.may_use(tier) else next(t for t in tiers.by_priority if key.may_use(t))


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
    in the request's body. Where access is open and no salt was asked for, it is empty, because not every server before
    which Tidegate runs can tell salts apart.
    """
    return "" if owner is None and requested is None else json.dumps((owner, requested))
