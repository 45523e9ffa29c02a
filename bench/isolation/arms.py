"""The arms of the experiment: who is loaded, with which traffic, under which tiers file.

An arm of ours is a tiers file that the running server is told to take; the peer (any OpenAI-compatible server) has arms
of its own. Knows files, promises and pins; not servers or time. Pure but for reading the shipped files.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from loadtest.traffic.scenario import Targets
from scheduler.config import parse_tiers

Document = dict[str, Any]  # a tiers file's content

PREMIUM_SERVICE_TIERS = ("priority", "fast")  # of a tier above the default one, in loads of three classes
INTERACTIVE, BULK = "interactive", "bulk"
BOTH = (INTERACTIVE, BULK)
OURS_ALONE, BULK_ALONE, FIRST_COME, STRICT, STATIC, AIMD, OURS = "A0", "A1", "A2", "A3", "A4", "A5", "OURS"
BEST_EFFORT = "BE"
PEER_ALONE, PEER_BULK, PEER = "X0", "XB", "X1"
OWN_ARMS = (OURS_ALONE, BULK_ALONE, FIRST_COME, STRICT, STATIC, AIMD, BEST_EFFORT, OURS)
OUR_TIERS = (OURS_ALONE, BEST_EFFORT, OURS)
KEEPING_PROMISES = (*OUR_TIERS, AIMD)
TITLES = {
    OURS_ALONE: "interactive alone",
    BULK_ALONE: "bulk alone",
    FIRST_COME: "first come, first served",
    STRICT: "strict priority only",
    STATIC: "best static budget",
    AIMD: "feedback (AIMD) only",
    BEST_EFFORT: "best effort: no deadlines told",
    OURS: "Tidegate",
    PEER_ALONE: "peer, interactive alone",
    PEER_BULK: "peer, bulk alone",
    PEER: "peer, with its priorities",
}
_FILES = {
    BULK_ALONE: "a3-strict-priority",  # nothing holds bulk back there: what the engine can do
    FIRST_COME: "a2-first-come",
    STRICT: "a3-strict-priority",
    STATIC: "a4-static",
    AIMD: "a5-aimd",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """`tiers` None: the peer, which is not told anything. `omitted`: fields that its requests leave out."""

    name: str
    roles: tuple[str, ...]
    tiers: Document | None
    omitted: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def is_peer(self) -> bool:
        return self.tiers is None

    @property
    def is_mixed(self) -> bool:
        return self.roles == BOTH

    @property
    def alone(self) -> str:
        """The arm that this one's latencies are held against."""
        return PEER_ALONE if self.is_peer else OURS_ALONE


@dataclass(frozen=True, slots=True)
class StaticBudget:
    """What bulk may take of each step, always."""

    batch_size: int  # sequences
    batch_tokens: int


def read_arm_file(name: str) -> Document:
    """A file of `bench/isolation/arms`, by its name without the ending."""
    text = (files("bench") / "isolation" / "arms" / f"{name}.yaml").read_text(encoding="utf-8")
    document: Document = yaml.safe_load(text)
    return document


@dataclass(frozen=True, slots=True)
class ArmBuilder:
    """`promise` takes the place of every SLO that an arm tries to keep, `budget` of the pins of A4. With `premium`,
    `priority` is a tier of its own, above the default one, whose SLO this is."""

    ours: Document
    promise: Targets
    budget: StaticBudget | None = None
    premium: Mapping[str, float] | None = None

    def build(self, name: str) -> Arm:
        if name in (PEER_ALONE, PEER_BULK, PEER):
            return Arm(name, _roles(name), None)
        tiers = self.ours if name in OUR_TIERS else read_arm_file(_FILES[name])
        if name in KEEPING_PROMISES:
            tiers = with_promise(tiers, self.promise)
        if name == STATIC and self.budget is not None:
            tiers = with_static_budget(tiers, self.budget)
        if self.premium is not None and name != FIRST_COME:  # which has one tier for everybody
            tiers = with_premium_tier(tiers, self.premium if name in KEEPING_PROMISES else {})
        return Arm(name, _roles(name), tiers, ("deadline_ms",) if name == BEST_EFFORT else ())

    def build_all(self, wanted: Sequence[str]) -> list[Arm]:
        """In the order of the report."""
        return [self.build(name) for name in TITLES if name in wanted]


def _roles(name: str) -> tuple[str, ...]:
    if name in (OURS_ALONE, PEER_ALONE):
        return (INTERACTIVE,)
    return (BULK,) if name in (BULK_ALONE, PEER_BULK) else BOTH


def with_promise(document: Document, promise: Targets) -> Document:
    """Every tier that promises something promises this, where it is said."""
    changed = deepcopy(document)
    said = {"ttft_p99_ms": promise.ttft_ms, "itl_p99_ms": promise.itl_ms}
    for tier in changed["tiers"].values():
        if promises_something(tier):
            tier["slo"] |= {key: value for key, value in said.items() if value is not None}
    return changed


def promises_something(tier: Document) -> bool:
    return any(value is not None for value in (tier.get("slo") or {}).values())


def with_static_budget(document: Document, budget: StaticBudget) -> Document:
    """Pins bulk's part of a step, of the tier that `flex` means and of the one of batches."""
    changed = deepcopy(document)
    tiers = parse_tiers(changed)
    flex = tiers.for_service_tier("flex")
    for name in {tiers.batch_tier, *([flex.name] if flex else [])}:
        pins = changed["tiers"][name].setdefault("pinned", {})
        pins |= {"batch_size": budget.batch_size, "batch_tokens": budget.batch_tokens}
    return changed


def with_premium_tier(document: Document, promise: Mapping[str, float]) -> Document:
    """`priority` and `fast` taken out of the default tier into one above it, which promises the same, and `promise`
    where that one promises anything: for loads of three classes."""
    changed = deepcopy(document)
    base = changed["tiers"][changed["default_tier"]]
    taken = [s for s in base.get("service_tiers", []) if s in PREMIUM_SERVICE_TIERS]
    base["service_tiers"] = [s for s in base["service_tiers"] if s not in taken]
    premium = deepcopy(base) | {"priority": base["priority"] + 100, "service_tiers": taken}
    premium.pop("name", None)
    if promises_something(base):
        premium["slo"] = base["slo"] | dict(promise)
    changed["tiers"] = {"premium": premium, **changed["tiers"]}
    return changed
