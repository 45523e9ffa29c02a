"""The tiers of a deployment: the models that validate `tiers.yaml`, and the functions that read it.

Knows the names and priorities of tiers, their SLOs, and the bounds of their knobs. Does not know which clients use a
tier (`gateway.identity` does), nor how a knob is moved (`scheduler.control` does). Error messages name the wrong key,
for example `tiers.bulk.batch_size.start: …`.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scheduler.routing import Routing
from scheduler.yaml_file import YamlFault, read_yaml


class TierConfigError(Exception):
    """An error in the tiers file; the message names the file and the wrong keys.

    `key` is the first wrong key, or None if the error concerns no key.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Bounds(_Strict):
    """The start value of a knob of the controller, and the range in which the controller may move the knob."""

    min: float = Field(ge=0)
    start: float = Field(ge=0)
    max: float = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min <= self.start <= self.max:
            raise ValueError("must satisfy min <= start <= max")
        return self


class CountBounds(Bounds):
    """The bounds of a knob whose values are whole numbers."""

    min: int = Field(ge=1)
    start: int = Field(ge=1)
    max: int = Field(ge=1)


class SLO(_Strict):
    """The latency targets of a tier in ms. None means that the tier has no such target."""

    ttft_p99_ms: float | None = Field(default=None, gt=0)
    itl_p99_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)  # mean time per token of a whole answer, without the first token

    @model_validator(mode="after")
    def _tpot_needs_ttft(self) -> Self:
        if self.tpot_ms is not None and self.ttft_p99_ms is None:
            raise ValueError("tpot_ms counts from ttft_p99_ms, which is missing: set it too")
        return self

    @property
    def is_interactive(self) -> bool:
        return self.ttft_p99_ms is not None or self.itl_p99_ms is not None


ServiceTierAnswer = Literal["default", "flex", "scale", "priority"]
TierName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]


class Pins(_Strict):
    """Fixed values for knobs that the controller must not move. None means that it may move the knob."""

    max_wait_ms: float | None = Field(default=None, ge=0)
    batch_size: int | None = Field(default=None, ge=1)
    batch_tokens: int | None = Field(default=None, ge=1)


class Admission(_Strict):
    """The rules for a request that the tier cannot serve in time.

    An interactive tier refuses a request whose first token is predicted to come after a limit: the tier's patience, or
    the TTFT SLO if `predict` is set. A bulk tier refuses a request that is predicted to end after its deadline.
    """

    patience_ms: float | None = Field(default=10_000, gt=0)  # None: requests wait however long it takes
    predict: bool = False  # the strict form: the limit is the TTFT SLO instead of the patience
    demote_to: str | None = None  # the lower tier that serves a refused request; None: it is not served
    reopen_at: float = Field(default=0.8, gt=0, le=1)  # a predicted TTFT below this share of the limit reopens the tier


class Retry(_Strict):
    """The limits on how often work on a request may be started again."""

    # Attempts at a request that may end with their workers. In the last one, the request runs alone in a step.
    max_attempts: int = Field(default=4, ge=1)
    max_preemptions: int = Field(default=3, ge=0)  # number of times that a sequence may lose its KV blocks


class ControllerSwitches(_Strict):
    """The switches of the SLA controller.

    If `feed_forward`, `feedback` and `suspend` are all off, the tiers are strict priorities with fixed budgets.
    """

    dry_run: bool = False  # compute and report every move of a knob, but do not make the move
    feed_forward: bool = True  # limit each step by the next-token deadlines of interactive sequences
    feedback: bool = True  # move batch size and max-wait according to the observed latencies
    suspend: bool = True  # suspend a running step of bulk when an interactive request arrives
    measure_slowdown: bool = False  # withhold bulk in short random slots, and compare


class Tier(_Strict):
    """One tier. The comments in tiers.yaml explain its keys."""

    name: str
    priority: int
    service_tiers: tuple[str, ...] = ()
    answers_as: ServiceTierAnswer | None = None
    slo: SLO = SLO()
    max_slowdown: float | None = Field(default=None, ge=1)  # of whole answers, as a multiple of their time alone
    max_wait_ms: Bounds = Bounds(min=0, start=0, max=0)
    batch_size: CountBounds = CountBounds(min=1, start=64, max=256)
    batch_tokens: CountBounds = CountBounds(min=16, start=2048, max=65536)
    pinned: Pins = Pins()
    min_share: float = Field(default=0.0, ge=0, lt=0.5, alias="floor")  # of engine time
    queue_limit: int = Field(default=10_000, ge=1)
    deadline_ms: int = Field(default=60_000, ge=1)
    timeout_ms: int | None = Field(default=None, ge=1)
    aging_ms: int | None = Field(default=None, ge=1)
    urgent_ms: int = Field(default=0, ge=0)
    admission: Admission = Admission()
    retry: Retry = Retry()

    @model_validator(mode="after")
    def _refuse_keys_without_effect(self) -> Self:
        """Raise `ValueError` if a key is set that has no effect on this kind of tier.

        Without the error, such a mistake would go unnoticed.
        """
        if self.is_interactive:
            kind, is_set = "without", {"floor": self.min_share, "aging_ms": self.aging_ms, "urgent_ms": self.urgent_ms}
        else:
            kind, default = "with", Admission()
            is_set = {"max_slowdown": self.max_slowdown} | {
                f"admission.{key}": getattr(self.admission, key) != getattr(default, key)
                for key in ("patience_ms", "predict", "reopen_at")
            }
        useless = next((key for key, value in is_set.items() if value), None)
        if useless is not None:
            raise ValueError(f"{useless} is for tiers {kind} a latency SLO: remove it from {self.name!r}")
        if self.admission.predict and self.slo.ttft_p99_ms is None:
            raise ValueError(f"admission.predict refuses by slo.ttft_p99_ms, which is missing in {self.name!r}")
        return self

    @property
    def can_be_urgent(self) -> bool:
        """Whether requests of this tier can become urgent, because of a near deadline or a long wait."""
        return not self.is_interactive and bool(self.urgent_ms or self.aging_ms)

    @property
    def ttft_limit_s(self) -> float | None:
        """The predicted time to the first token in seconds beyond which a request is refused; None: no such limit."""
        limit_ms = self.slo.ttft_p99_ms if self.admission.predict else self.admission.patience_ms
        return None if limit_ms is None else limit_ms / 1000

    @cached_property
    def is_interactive(self) -> bool:
        """Whether the tier has a latency SLO. A tier without a latency SLO is a bulk tier.

        Bulk tiers share the engine time that interactive tiers leave unused.
        """
        return self.slo.is_interactive


class TierSet(_Strict):
    """All tiers of a deployment."""

    default_tier: str
    batch_tier: str
    controller: ControllerSwitches = ControllerSwitches()
    routing: Routing = Routing()
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
        for name, rule in self.routing.rules.items():
            if rule.tier not in self.tiers:
                raise ValueError(f"routing.rules.{name}.tier: there is no tier {rule.tier!r}")
        owner: dict[str, str] = {}
        for name, tier in self.tiers.items():
            if tier.name != name:
                raise ValueError(f"tiers.{name}.name: must be {name!r}, like its key; or leave it out")
            for service_tier in tier.service_tiers:
                if service_tier in owner:
                    raise ValueError(
                        f"tiers.{tier.name}.service_tiers: {service_tier!r} belongs to {owner[service_tier]!r} already"
                    )
                owner[service_tier] = tier.name
        for tier in self.tiers.values():
            self._check_demotion(tier)
        return self

    def _check_demotion(self, tier: Tier) -> None:
        to = tier.admission.demote_to
        if to is not None and (to not in self.tiers or self.tiers[to].priority >= tier.priority):
            raise ValueError(f"tiers.{tier.name}.admission.demote_to: {to!r} is not a tier of lower priority")

    @property
    def by_priority(self) -> tuple[Tier, ...]:
        """The tiers from the highest priority to the lowest. Tiers of equal priority are sorted by name."""
        return tuple(sorted(self.tiers.values(), key=lambda t: (-t.priority, t.name)))

    def __getitem__(self, name: str) -> Tier:
        return self.tiers[name]

    def for_service_tier(self, service_tier: str) -> Tier | None:
        return next((t for t in self.tiers.values() if service_tier in t.service_tiers), None)

    def document(self, *, defaults: bool) -> dict[str, Any]:
        """Return the tiers as plain data that `parse_tiers` can read.

        With `defaults`, the data also has the keys that were not set.
        """
        document = self.model_dump(mode="json", by_alias=True, exclude_unset=not defaults)
        for tier in document["tiers"].values():
            del tier["name"]
        return document


def shipped_tiers_path() -> Path:
    """Return the path of the shipped tiers.yaml.

    In an installed wheel, the file is in the folder of `tidegate`. In a source tree, it is in the top folder.
    """
    top = Path(__file__).resolve().parents[1]
    installed = top / "tidegate" / "tiers.yaml"
    return installed if installed.exists() else top / "tiers.yaml"


def load_tiers(path: Path) -> TierSet:
    """Read and validate a tiers file.

    Raises `TierConfigError` if the file cannot be read or is not valid. The message names every wrong key.
    """
    try:
        data = read_yaml(path)
    except YamlFault as error:
        raise TierConfigError(str(error)) from error
    return parse_tiers(data, str(path))


def parse_tiers(data: object, source: str = "tiers.yaml") -> TierSet:
    """Validate the content of a tiers file. `source` names the file in error messages.

    Raises `TierConfigError` if `data` is not valid. The message names every wrong key.
    """
    if not isinstance(data, dict):
        raise TierConfigError(f"{source}: expected a mapping with the keys default_tier, batch_tier, tiers")
    try:
        return TierSet.model_validate(data)
    except ValidationError as error:
        lines = [_describe(e["loc"], e["msg"]) for e in error.errors(include_url=False)]
        key, _, _ = lines[0].partition(": ")
        raise TierConfigError(f"{source}: " + "; ".join(lines), key) from error


def _describe(loc: tuple[int | str, ...], message: str) -> str:
    key = ".".join(str(part) for part in loc if part != "[key]")
    message = message.removeprefix("Value error, ")
    return f"{key}: {message}" if key else message
