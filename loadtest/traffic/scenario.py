"""A scenario: the classes of traffic that a server receives at the same time, validated from YAML.

Knows names, rates and lengths. Does not know how a class becomes requests (see `workload`) or how requests are sent
(see `runner`). Error messages name the wrong key: `classes.bulk.output_tokens: …`.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from loadtest.traffic.scenario_arrivals import ClosedLoop, OpenLoop, Strict
from scheduler.yaml_file import YamlFault, parse_yaml

POOLS = "pools"  # folder of the shipped bulk pools
Role = Literal["interactive", "bulk"]
BOTH_ROLES: tuple[Role, ...] = ("interactive", "bulk")


class ScenarioError(Exception):
    """The scenario cannot be used. The message names the file and the key."""


class Lengths(Strict):
    """A distribution of lengths in tokens, limited to [min, max].

    It is lognormal around `median`, or uniform if there is no median. In YAML, a single number stands for a fixed
    length.
    """

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

    def scaled(self, factor: float) -> Self:
        """Return a copy with all lengths multiplied by `factor`, but at least one token each. `sigma` stays the same.

        The bounds are rounded down: if a length fitted a context, the new length fits that context multiplied by
        `factor`.
        """
        low, high = (max(1, int(factor * bound)) for bound in (self.min, self.max))
        median = None if self.median is None else factor * self.median
        return self.model_copy(update={"min": low, "max": high, "median": median})


class SharedPrefixes(Strict):
    """A set of `count` different prefixes. Each prompt, or each session, starts with one of them."""

    count: int = Field(ge=1, le=10_000)
    tokens: Lengths


class Sessions(Strict):
    """Conversations of several turns: each arrival of the class starts a session.

    A session has `turns_mean` turns on average (geometric distribution). Each turn begins an exponentially distributed
    time of mean `think_s` after the beginning of the previous turn, and its prompt holds the whole history. A session
    ends early if the next turn would exceed `max_tokens`. The share `documents` of the sessions starts with a prompt of
    `document_tokens`.
    """

    turns_mean: float = Field(ge=1, le=1000)
    think_s: float = Field(gt=0)
    max_tokens: int = Field(ge=2)  # largest sum of prompt and output of one turn
    documents: float = Field(default=0.0, ge=0, le=1)
    document_tokens: Lengths | None = None

    @model_validator(mode="after")
    def _documents_have_lengths(self) -> Self:
        if self.documents and self.document_tokens is None:
            raise ValueError("document_tokens: needed where documents is not 0")
        return self


class Targets(Strict):
    """The latency limits of a request, measured at the client's socket.

    A request that meets all of them counts as served in time.
    """

    ttft_ms: float | None = Field(default=None, gt=0)
    itl_ms: float | None = Field(default=None, gt=0)  # limit on the p99 of the gaps between tokens of one request
    e2e_ms: float | None = Field(default=None, gt=0)


class TrafficClass(Strict):
    name: str
    # Isolation compares interactive classes while bulk classes run with interactive classes alone.
    role: Role
    service_tier: str | None = None  # the request field of this name; None: the field is left out
    key: str = ""  # name of the API key that sends the class, in simulations: keys of a tier share the engine
    key_weight: int = Field(default=1, ge=1)
    arrivals: OpenLoop | ClosedLoop
    prompt_tokens: Lengths  # without the shared prefix, if there is one
    output_tokens: Lengths
    prefixes: SharedPrefixes | None = None
    sessions: Sessions | None = None
    targets: Targets = Targets()
    endpoint: Literal["chat", "completions"] = "completions"
    stream: bool = True
    extra_body: dict[str, Any] = {}  # further request fields, such as {priority: 10} for servers without service_tier

    @model_validator(mode="after")
    def _sessions_are_open(self) -> Self:
        if self.sessions is not None and isinstance(self.arrivals, ClosedLoop):
            raise ValueError("sessions: need open-loop arrivals")
        return self

    @property
    def deadline_s(self) -> float | None:
        """Seconds from arrival to the last token that each request asks for; None: those of its tier."""
        deadline_ms = self.extra_body.get("deadline_ms")
        return None if deadline_ms is None else deadline_ms / 1000

    def with_lengths_scaled(self, factor: float) -> Self:
        """Return a copy of the class with all lengths multiplied by `factor`.

        This includes the lengths of prompts, outputs, prefixes, documents and sessions.
        """
        changes: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens.scaled(factor),
            "output_tokens": self.output_tokens.scaled(factor),
        }
        if self.prefixes is not None:
            changes["prefixes"] = self.prefixes.model_copy(update={"tokens": self.prefixes.tokens.scaled(factor)})
        if self.sessions is not None:
            document = self.sessions.document_tokens
            changed = {
                "max_tokens": max(2, round(factor * self.sessions.max_tokens)),
                "document_tokens": None if document is None else document.scaled(factor),
            }
            changes["sessions"] = self.sessions.model_copy(update=changed)
        return self.model_copy(update=changes)

    def with_load_scaled(self, factor: float) -> Self:
        """Return a copy of the class with `factor` times the clients of an open loop, or streams of a closed loop.

        A closed loop of bulk is returned unchanged, since its backlog is full at any load.
        """
        if isinstance(self.arrivals, ClosedLoop) and self.role == "bulk":
            return self
        return self.model_copy(update={"arrivals": self.arrivals.scaled(factor)})


class Scenario(Strict):
    description: str = ""
    context: int | None = Field(default=None, ge=16)  # tokens of the longest request; None: unknown
    bulk_pool: str | None = None  # name of the shipped pool whose classes were added
    classes: dict[str, TrafficClass] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _name_classes(cls, data: Any) -> Any:
        classes = data.get("classes") if isinstance(data, dict) else None
        if not isinstance(classes, dict):
            return data
        named = {n: {"name": n, **c} if isinstance(c, dict) else c for n, c in classes.items()}
        return {**data, "classes": named}

    def with_role(self, role: Role) -> tuple[TrafficClass, ...]:
        return tuple(c for c in self.classes.values() if c.role == role)

    def scale_for(self, max_model_len: int | None) -> float:
        """Return the factor by which lengths must be multiplied to fit the context of a model.

        Return 1 if the lengths fit, or if the needed context or the context of the model is unknown.
        """
        if self.context is None or max_model_len is None:
            return 1.0
        return min(1.0, max_model_len / self.context)

    def with_lengths_scaled(self, factor: float) -> Self:
        """Return a copy of the scenario with the lengths of all classes multiplied by `factor`.

        This includes the lengths of prompts, outputs, prefixes, documents and sessions, and the needed context.
        """
        classes = {name: c.with_lengths_scaled(factor) for name, c in self.classes.items()}
        context = None if self.context is None else max(16, round(factor * self.context))
        return self.model_copy(update={"classes": classes, "context": context})

    def with_service_tier(self, service_tier: str) -> Self:
        """Return a copy whose interactive classes ask for this service tier."""
        changed = {c.name: c.model_copy(update={"service_tier": service_tier}) for c in self.with_role("interactive")}
        return self.model_copy(update={"classes": {**self.classes, **changed}})

    def with_load_scaled(self, factor: float, role: Role = "interactive") -> Self:
        """Return a copy in which the classes with this role have `factor` times the clients."""
        classes = {n: c.with_load_scaled(factor) if c.role == role else c for n, c in self.classes.items()}
        return self.model_copy(update={"classes": classes})


def shipped_scenarios() -> list[str]:
    return _shipped("scenarios")


def shipped_pools() -> list[str]:
    return _shipped("scenarios", POOLS)


def load_scenario(name_or_path: str, bulk_pool: str = "", needed: Sequence[Role] = BOTH_ROLES) -> Scenario:
    """Return the shipped scenario of this name, or the scenario in the file at this path.

    If `bulk_pool` is given, it replaces the bulk classes of the scenario. Raises `ScenarioError`, also if the scenario
    has no class of a `needed` role.
    """
    if name_or_path in shipped_scenarios():
        text = (files("loadtest") / "traffic" / "scenarios" / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    else:
        text = _read(Path(name_or_path))
    try:
        scenario = Scenario.model_validate(_with_pool(parse_yaml(text), bulk_pool))
    except YamlFault as error:
        raise ScenarioError(f"{name_or_path}: {error}") from error
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ScenarioError(f"{name_or_path}: " + "; ".join(lines)) from error
    if missing := [role for role in needed if not scenario.with_role(role)]:
        raise ScenarioError(f"{name_or_path}: classes: no class has the role {missing[0]}, which is needed here")
    return scenario


def _with_pool(data: Any, wanted: str) -> Any:
    """Return the mapping of a scenario, with the classes of its bulk pool added.

    If `wanted` names a pool, this pool replaces all bulk classes of the scenario.
    """
    if not isinstance(data, dict) or not isinstance(data.get("classes"), dict):
        return data
    name, classes = wanted or data.get("bulk_pool"), data["classes"]
    if name is None:
        return data
    if name not in shipped_pools():
        raise ScenarioError(f"there is no bulk pool {name!r} (shipped: {', '.join(shipped_pools())})")
    pool = parse_yaml(
        (files("loadtest") / "traffic" / "scenarios" / POOLS / f"{name}.yaml").read_text(encoding="utf-8")
    )
    if wanted:
        classes = {n: c for n, c in classes.items() if not (isinstance(c, dict) and c.get("role") == "bulk")}
    context = max(data.get("context") or 0, pool["context"]) if data.get("context") else None
    return {**data, "bulk_pool": name, "context": context, "classes": {**classes, **pool["classes"]}}


def _shipped(*folder: str) -> list[str]:
    found = files("loadtest").joinpath("traffic", *folder)
    return sorted(f.name.removesuffix(".yaml") for f in found.iterdir() if f.name.endswith(".yaml"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(shipped_scenarios())
        raise ScenarioError(f"{path}: {error.strerror} (shipped scenarios: {known})") from error
