"""`tiers.yaml`, validated: what each tier is promised and the bounds of its knobs.

Knows names, priorities and numbers; not who asks (the gateway's identity) nor what a knob does (the SLA
controller). Errors name the key: `tiers.bulk.batch_size.start: …`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class TierConfigError(Exception):
    """tiers.yaml cannot be used; the message names file and key."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Bounds(_Strict):
    """A knob of the controller: where it starts and how far it may move."""

    min: float = Field(ge=0)
    start: float = Field(ge=0)
    max: float = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min <= self.start <= self.max:
            raise ValueError("must satisfy min <= start <= max")
        return self


class CountBounds(Bounds):
    min: int = Field(ge=1)
    start: int = Field(ge=1)
    max: int = Field(ge=1)


class SLO(_Strict):
    """Latency targets in ms; None: no promise."""

    ttft_p99_ms: float | None = Field(default=None, gt=0)
    itl_p99_ms: float | None = Field(default=None, gt=0)

    @property
    def is_interactive(self) -> bool:
        return self.ttft_p99_ms is not None or self.itl_p99_ms is not None


ServiceTierAnswer = Literal["default", "flex", "scale", "priority"]
TierName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]


class Tier(_Strict):
    name: str
    priority: int
    service_tiers: tuple[str, ...] = ()
    answers_as: ServiceTierAnswer | None = None
    slo: SLO = SLO()
    max_wait_ms: Bounds = Bounds(min=0, start=0, max=0)
    batch_size: CountBounds = CountBounds(min=1, start=64, max=256)
    floor: float = Field(default=0.0, ge=0, lt=0.5)
    queue_limit: int = Field(default=10_000, ge=1)
    deadline_ms: int = Field(default=60_000, ge=1)
    timeout_ms: int | None = Field(default=None, ge=1)

    @property
    def is_interactive(self) -> bool:
        """Has a latency promise; the others share what these leave."""
        return self.slo.is_interactive


class TierSet(_Strict):
    """All tiers of a deployment."""

    default_tier: str
    batch_tier: str
    tiers: dict[TierName, Tier] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _name_tiers(cls, data: Any) -> Any:
        tiers = data.get("tiers") if isinstance(data, dict) else None
        if not isinstance(tiers, dict):
            return data
        named = {n: {"name": n, **t} if isinstance(t, dict) else t for n, t in tiers.items()}
        return {**data, "tiers": named}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key in ("default_tier", "batch_tier"):
            if getattr(self, key) not in self.tiers:
                raise ValueError(f"{key}: there is no tier {getattr(self, key)!r}")
        owner: dict[str, str] = {}
        for tier in self.tiers.values():
            for service_tier in tier.service_tiers:
                if service_tier in owner:
                    raise ValueError(
                        f"tiers.{tier.name}.service_tiers: {service_tier!r} belongs to {owner[service_tier]!r} already"
                    )
                owner[service_tier] = tier.name
        return self

    @property
    def by_priority(self) -> tuple[Tier, ...]:
        """Highest first; ties by name, so that the order is total."""
        return tuple(sorted(self.tiers.values(), key=lambda t: (-t.priority, t.name)))

    def __getitem__(self, name: str) -> Tier:
        return self.tiers[name]

    def for_service_tier(self, service_tier: str) -> Tier | None:
        return next((t for t in self.tiers.values() if service_tier in t.service_tiers), None)


def load_tiers(path: Path) -> TierSet:
    """Read and validate a tiers file. Raises `TierConfigError` with one line for each wrong key."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TierConfigError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise TierConfigError(f"{path}: not YAML: {error}") from error
    return parse_tiers(data, str(path))


def parse_tiers(data: object, source: str = "tiers.yaml") -> TierSet:
    if not isinstance(data, dict):
        raise TierConfigError(f"{source}: expected a mapping with the keys default_tier, batch_tier, tiers")
    try:
        return TierSet.model_validate(data)
    except ValidationError as error:
        lines = [_describe(e["loc"], e["msg"]) for e in error.errors(include_url=False)]
        raise TierConfigError(f"{source}: " + "; ".join(lines)) from error


def _describe(loc: tuple[int | str, ...], message: str) -> str:
    key = ".".join(str(part) for part in loc if part != "[key]")
    message = message.removeprefix("Value error, ")
    return f"{key}: {message}" if key else message
