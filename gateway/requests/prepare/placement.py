"""Where a request goes: its caller, the tier that generates its answer, and what the caller chose beside it.

Knows API keys, tiers and the headers that choose among them; does not know prompts or answers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.identity import ApiKey, ResolvedTier, demotion_of, patient_service_tier, resolve_named, resolve_tier
from gateway.protocol.bodies.options import GenerationBody
from gateway.protocol.errors import invalid_value
from gateway.requests.prepare.routing import Routed
from scheduler.config import Tier, TierSet
from scheduler.request import JobPart

CACHE_HEADER = "x-tidegate-cache"  # seconds for which the answer is kept; in an answer: whether it was found
TTFT_HEADER = "x-llm-d-slo-ttft-ms"  # of clients of llm-d: the latency SLO that the request asks for
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
    weight: int = 1  # of the caller's key
    demotion: ResolvedTier | None = None  # the lower tier that serves what `tier` cannot serve in time
    patient: str | None = None  # the `service_tier` that a rejection recommends
    receipt_for: str | None = None  # the `service_tier` that was asked for, if the answer shall have a receipt
    cache_ttl_s: int | None = None  # seconds for which the answer is kept in the cache; None: it is not looked up
    rule: str | None = None  # the name of the routing rule that chose the tier
    part: JobPart | None = None  # the part of a job that this is
    is_limited: bool = True  # whether the limits of the owner's key count; what it uses is counted in any case


def place(
    asked: GenerationBody,
    headers: Mapping[str, str],
    key: ApiKey | None,
    tiers: TierSet,
    request_id: str,
    rule: Routed | None = None,
) -> Placement:
    """Return where a request of an HTTP client goes. Raises `ApiError` 400 if what it asks for is unknown.

    `rule` is the routing rule that the request meets. It chooses the tier of a request that asks for none.
    """
    cache_ttl_s = _cache_ttl_s(headers.get(CACHE_HEADER))
    resolved = resolve_tier(None, key, tiers)
    wished = wished_service_tier(asked.service_tier, asked.priority, headers.get(TTFT_HEADER), resolved.tier, tiers)
    if wished is not None:
        resolved = resolve_tier(wished, key, tiers)
    if rule is not None and (wished not in (None, "auto") or rule.tier not in tiers.tiers):
        rule = None
    if rule is not None:
        resolved = resolve_named(tiers[rule.tier], key, tiers)
    has_receipt = headers.get(RECEIPT_HEADER, "0").lower() not in ("0", "false", "")
    return Placement(
        tier=resolved.tier,
        service_tier=resolved.service_tier,
        request_id=request_id,
        owner=key.name if key else None,
        weight=key.weight if key else 1,
        demotion=demotion_of(resolved.tier, key, tiers),
        patient=patient_service_tier(resolved.tier, key, tiers),
        receipt_for=(wished or "auto") if has_receipt else None,
        cache_ttl_s=cache_ttl_s,
        rule=None if rule is None else rule.name,
    )


def _cache_ttl_s(header: str | None) -> int | None:
    """Return the seconds that a request asks for in its header; None if it does not ask for the cache."""
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and int(header[:12]) > 0):
        message = f"Invalid value for the header {CACHE_HEADER}: the seconds to keep the answer, a whole number from 1."
        raise invalid_value(CACHE_HEADER, message)
    return int(header[:12])


def wished_service_tier(
    service_tier: str | None, priority: int | None, slo_ttft_ms: str | None, usual: Tier, tiers: TierSet
) -> str | None:
    """Return the `service_tier` that a request asks for, also as clients of other servers do; None: the usual tier.

    `usual` is the tier of requests that ask for none. A named tier goes before `priority`, and `priority` before the
    header, whose value is `slo_ttft_ms`. Raises `ApiError` 400 if this value is not a positive number.
    """
    if service_tier not in (None, "auto") or not (priority or slo_ttft_ms is not None):
        return service_tier
    nameable = [tier for tier in tiers.by_priority if _name_of(tier) is not None]
    if priority:
        return _name_of(_moved(usual, priority, nameable))
    assert slo_ttft_ms is not None
    return _name_of(_for_ttft(_parse_ms(slo_ttft_ms), nameable))


def _moved(usual: Tier, priority: int, nameable: list[Tier]) -> Tier | None:
    """Return the tier `priority` places below `usual` (negative: above it), or the last one in this direction.

    In vLLM, 0 is the default, and a request with a lower number goes first.
    """
    if priority > 0:
        below = [tier for tier in nameable if tier.priority < usual.priority]
        return below[min(priority, len(below)) - 1] if below else None
    above = [tier for tier in reversed(nameable) if tier.priority > usual.priority]
    return above[min(-priority, len(above)) - 1] if above else None


def _for_ttft(wanted_ms: float, nameable: list[Tier]) -> Tier | None:
    """Return the tier with the longest TTFT SLO that is short enough; else the one with the shortest."""
    promised = [(tier.slo.ttft_p99_ms, tier) for tier in nameable if tier.slo.ttft_p99_ms is not None]
    kept = [found for found in promised if found[0] <= wanted_ms]
    if kept:
        return max(kept, key=lambda found: found[0])[1]
    return min(promised, key=lambda found: found[0])[1] if promised else None


def _name_of(tier: Tier | None) -> str | None:
    """Return a `service_tier` that means `tier`; None if there is none."""
    names = () if tier is None else tier.service_tiers
    return next((name for name in names if name != "auto"), None)


def _parse_ms(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise invalid_value(
            TTFT_HEADER, f"Invalid value for the header '{TTFT_HEADER}': it must be a number of ms above 0."
        )
    return value
