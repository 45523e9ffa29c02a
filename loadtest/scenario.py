"""A scenario: which classes of traffic meet on the server, validated from YAML.

Knows names, rates and lengths; not how a class is turned into requests (`workload`) nor who sends them
(`runner`). Errors name the key: `classes.bulk.output_tokens: …`.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ScenarioError(Exception):
    """The scenario cannot be used; the message names file and key."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Lengths(_Strict):
    """Tokens: lognormal around `median`, or uniform without it; in [min, max]. A bare number is fixed."""

    min: int = Field(ge=1)
    max: int = Field(ge=1, le=1_000_000)
    median: float | None = Field(default=None, gt=0)
    sigma: float = Field(default=0.0, ge=0, le=5)

    @model_validator(mode="before")
    @classmethod
    def _fixed(cls, data: Any) -> Any:
        return {"min": data, "max": data} if isinstance(data, int) else data

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError("must satisfy min <= max")
        return self


class OpenLoop(_Strict):
    """Arrivals that do not wait for answers: gamma-distributed gaps. `cv` 1 is a Poisson process, more is
    burstier."""

    rate_per_s: float = Field(gt=0, le=10_000)
    cv: float = Field(default=1.0, gt=0, le=20)


class ClosedLoop(_Strict):
    """A backlog: `streams` requests are always in flight; each answer starts the next one."""

    streams: int = Field(ge=1, le=900)


class TrafficClass(_Strict):
    name: str
    role: Literal["interactive", "bulk"]  # bulk is what the isolation of interactive is measured against
    service_tier: str | None = None  # the request field; None leaves it out
    arrivals: OpenLoop | ClosedLoop
    prompt_tokens: Lengths
    output_tokens: Lengths
    endpoint: Literal["chat", "completions"] = "completions"
    extra_body: dict[str, Any] = {}  # e.g. {priority: 10} for servers that know no service_tier


class Scenario(_Strict):
    description: str = ""
    classes: dict[str, TrafficClass] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _name_classes(cls, data: Any) -> Any:
        classes = data.get("classes") if isinstance(data, dict) else None
        if not isinstance(classes, dict):
            return data
        named = {n: {"name": n, **c} if isinstance(c, dict) else c for n, c in classes.items()}
        return {**data, "classes": named}

    @model_validator(mode="after")
    def _both_roles(self) -> Self:
        if {c.role for c in self.classes.values()} != {"interactive", "bulk"}:
            raise ValueError("classes: needs at least one class of each role, interactive and bulk")
        return self

    def with_role(self, role: str) -> tuple[TrafficClass, ...]:
        return tuple(c for c in self.classes.values() if c.role == role)


def shipped_scenarios() -> list[str]:
    folder = files("loadtest") / "scenarios"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_scenario(name_or_path: str) -> Scenario:
    """A shipped scenario by its name, or a file. Raises `ScenarioError`."""
    if name_or_path in shipped_scenarios():
        text = (files("loadtest") / "scenarios" / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    else:
        text = _read(Path(name_or_path))
    try:
        return Scenario.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ScenarioError(f"{name_or_path}: not YAML: {error}") from error
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ScenarioError(f"{name_or_path}: " + "; ".join(lines)) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(shipped_scenarios())
        raise ScenarioError(f"{path}: {error.strerror} (shipped scenarios: {known})") from error
