"""Where a request goes: its caller, the tier that generates its answer, and what the caller chose beside it.

Knows API keys, tiers and the headers that choose among them; does not know prompts or answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.identity import ApiKey, ResolvedTier, demotion_of, patient_service_tier, resolve_tier
from gateway.protocol.bodies.options import GenerationBody
from gateway.protocol.bodies.tier_synonyms import TTFT_HEADER, wished_service_tier
from gateway.protocol.errors import invalid_value
from scheduler.config import Tier, TierSet
from scheduler.request import JobPart

CACHE_HEADER = "x-tidegate-cache"  # seconds for which the answer is kept; in an answer: whether it was found
RECEIPT_HEADER = "x-tidegate-receipt"  # a request with it gets an answer with a receipt


@dataclass(frozen=True, slots=True)
class Placement:
    """The caller of a request, the tier that generates its answer, and what the caller chose beside it.

    `service_tier` is the one that the answer reports. `request_id` must be new each time, because the ids of the
    scheduler's requests are made from it. `owner` is the name of the caller's API key (None: access is open).
    """

    tier: Tier
    service_tier: str
    request_id: str
    owner: str | None = None
    demotion: ResolvedTier | None = None  # the lower tier that serves what `tier` cannot serve in time
    patient: str | None = None  # the `service_tier` that a rejection recommends
    receipt_for: str | None = None  # the `service_tier` that was asked for, if the answer shall have a receipt
    cache_ttl_s: int | None = None  # seconds for which the answer is kept in the cache; None: it is not looked up
    part: JobPart | None = None  # the part of a job that this is
    is_limited: bool = True  # whether the limits of the owner's key count; what it uses is counted in any case


def place(
    asked: GenerationBody, headers: Mapping[str, str], key: ApiKey | None, tiers: TierSet, request_id: str
) -> Placement:
    """Return where a request of an HTTP client goes. Raises `ApiError` 400 if what it asks for is unknown."""
    cache_ttl_s = _cache_ttl_s(headers.get(CACHE_HEADER))
    wished = _wished_tier(asked, headers.get(TTFT_HEADER), key, tiers)
    resolved = resolve_tier(wished, key, tiers)
    has_receipt = headers.get(RECEIPT_HEADER, "0").lower() not in ("0", "false", "")
    return Placement(
        tier=resolved.tier,
        service_tier=resolved.service_tier,
        request_id=request_id,
        owner=key.name if key else None,
        demotion=demotion_of(resolved.tier, key, tiers),
        patient=patient_service_tier(resolved.tier, key, tiers),
        receipt_for=(wished or "auto") if has_receipt else None,
        cache_ttl_s=cache_ttl_s,
    )


def _wished_tier(asked: GenerationBody, slo_ttft_ms: str | None, key: ApiKey | None, tiers: TierSet) -> str | None:
    if not asked.priority and slo_ttft_ms is None:
        return asked.service_tier
    usual = resolve_tier(None, key, tiers).tier
    return wished_service_tier(asked.service_tier, asked.priority, slo_ttft_ms, usual, tiers)


def _cache_ttl_s(header: str | None) -> int | None:
    """Return the seconds that a request asks for in its header; None if it does not ask for the cache."""
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and int(header[:12]) > 0):
        message = f"Invalid value for the header {CACHE_HEADER}: the seconds to keep the answer, a whole number from 1."
        raise invalid_value(CACHE_HEADER, message)
    return int(header[:12])
