"""What callers are told of the limits and budgets of their key: headers of what is left, and refusals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from gateway.identity import Holder, Project
from gateway.keys.prices import NANO
from gateway.protocol.errors import ApiError, retry_after

BUSY_RETRY_S = 1.0  # seconds of Retry-After if too many requests are open: nobody knows when one of them ends
FINAL = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of the buckets of a key or a project after a script."""

    holder: Holder
    requests: float
    tokens: float

    def limited(self) -> list[tuple[str, int, float]]:
        """Return (name, limit per minute, level) of each bucket that has a limit."""
        buckets = (
            ("requests", self.holder.requests_per_minute, self.requests),
            ("tokens", self.holder.tokens_per_minute, self.tokens),
        )
        return [(name, limit, level) for name, limit, level in buckets if limit is not None]


def headers_of(levels: Sequence[Levels]) -> dict[str, str]:
    """Return OpenAI's headers: of each kind of limit, the one of which least is left.

    A limit is reset when its bucket is full again.
    """
    headers = {}
    for kind in ("requests", "tokens"):
        found = [(level, limit) for one in levels for name, limit, level in one.limited() if name == kind]
        if found:
            level, limit = min(found)
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(level)))
            headers[f"x-ratelimit-reset-{kind}"] = go_duration(60 * (limit - level) / limit)
    return headers


def refusal(levels: Sequence[Levels], lacking: Holder, kind: str, tokens: int, num_choices: int) -> ApiError:
    """Return the error for a request for which a holder lacks `kind`: `open`, `requests` or `tokens`."""
    headers = headers_of(levels)
    if kind == "open":
        return too_many_choices(lacking, num_choices, headers | retry_after(BUSY_RETRY_S))
    wanted = {"requests": 1, "tokens": tokens}
    buckets = [(one.holder, *bucket) for one in levels for bucket in one.limited()]
    wait_s = max(60 * (wanted[name] - level) / limit for _, name, limit, level in buckets)
    limit, level = next(bucket[2:] for bucket in buckets if bucket[:2] == (lacking, kind))
    message = (
        f"Rate limit reached for {kind} per minute of {_named(lacking)}: limit {limit}, "
        f"left {max(0, math.floor(level))}, requested {wanted[kind]}. Try again in {go_duration(wait_s)}."
    )
    return _refused(kind, message, headers | retry_after(wait_s))


def too_many_tokens(holder: Holder, limit: int, tokens: int) -> ApiError:
    message = (
        f"Request too large for the tokens per minute of {_named(holder)}: limit {limit}, requested {tokens} (prompt "
        "and maximum output). Shorten the prompt or lower the maximum of output tokens."
    )
    full = headers_of([Levels(holder, holder.requests_per_minute or 0, limit)])
    headers = {name: value for name, value in full.items() if name.startswith("x-ratelimit-limit")}
    return _refused("tokens", message, headers | FINAL)


def too_many_choices(holder: Holder, wanted: int, headers: dict[str, str]) -> ApiError:
    name = _named(holder)
    limit = holder.concurrent_requests or 0
    way_out = "Lower n." if wanted > limit else "Try again when others have ended, or lower n."
    message = (
        f"{name[0].upper()}{name[1:]} may have {limit} choices generated at the same time "
        f"(prompts × n of all its open requests), and this request has {wanted} choices. {way_out}"
    )
    return _refused("requests", message, headers)


def budget_spent(holder: Holder, name: str, left: int, wanted: int, now_ms: int) -> ApiError:
    """Return the error for a request that needs `wanted` of the budget `name`, such as `cost_per_day`.

    Costs are in nano. 0 is wanted by a request that needs anything that is left.
    """
    unit, _, period = name.partition("_per_")
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    reset = next_reset(now, period)
    shown = [f"{amount / NANO:.6g}" if unit == "cost" else str(amount) for amount in (max(0, left), wanted)]
    needs = f", and this request may need {shown[1]} (prompt and maximum output)" if wanted else ""
    kind = "project" if isinstance(holder, Project) else "key"
    message = (
        f"You exceeded the budget of {_named(holder)}: {getattr(holder.budget, name):.12g} {unit} per {period}, of "
        f"which {shown[0]} is left{needs}. It is reset at {reset:%Y-%m-%dT%H:%M:%SZ}, in "
        f"{go_duration((reset - now).total_seconds())}. An administrator of this server can raise `budget.{name}` of "
        f"the {kind} {holder.name!r}."
    )
    return ApiError(429, message, "insufficient_quota", code="insufficient_quota", headers=FINAL)


def _named(holder: Holder) -> str:
    return f"the project {holder.name!r} of this API key" if isinstance(holder, Project) else "this API key"


def next_reset(now: datetime, period: str) -> datetime:
    """Return when the UTC day or month ends that `now` lies in."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return today + timedelta(days=1) if period == "day" else (today.replace(day=1) + timedelta(days=32)).replace(day=1)


def _refused(kind: str, message: str, headers: dict[str, str]) -> ApiError:
    return ApiError(429, message, kind, code="rate_limit_exceeded", headers=headers)


def go_duration(seconds: float) -> str:
    """Return a duration as Go prints it, which OpenAI's headers use: `120ms`, `1.5s`, `6m0s`. Rounded up to 1 ms."""
    milliseconds = math.ceil(round(1000 * seconds, 3))
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:g}s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text
