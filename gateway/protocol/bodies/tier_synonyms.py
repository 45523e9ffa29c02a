"""Translate the ways in which other servers' clients ask for priority into a `service_tier`.

These are vLLM's field `priority` and llm-d's header `x-llm-d-slo-ttft-ms`. Knows tiers; does not know API keys: a tier
that the caller's key may not use is replaced later, as if the client had named it (gateway/identity.py).
"""

import math

from gateway.protocol.errors import invalid_value
from scheduler.config import Tier, TierSet

TTFT_HEADER = "x-llm-d-slo-ttft-ms"


def wished_service_tier(
    service_tier: str | None, priority: int | None, slo_ttft_ms: str | None, usual: Tier, tiers: TierSet
) -> str | None:
    """Return the `service_tier` that a request asks for; None: the usual tier.

    `usual` is the tier of requests that ask for none. A named tier goes before `priority`, and `priority` before the
    header, whose value is `slo_ttft_ms`. Raises `ApiError` 400 if this value is not a positive number.
    """
    if service_tier not in (None, "auto"):
        return service_tier
    nameable = [tier for tier in tiers.by_priority if _name_of(tier) is not None]
    if priority:
        return _name_of(_moved(usual, priority, nameable))
    if slo_ttft_ms is not None:
        return _name_of(_for_ttft(_parse_ms(slo_ttft_ms), nameable))
    return service_tier


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
