"""The arms of an experiment. An arm is a kind of load, together with the tiers that the server uses under this load.

Our running server is told to use the tiers document of each of our arms. The peer (any OpenAI-compatible server) has
separate arms, without a tiers document. Knows documents, SLOs and pinned values; does not know servers or times. Pure,
except that it reads the arm files of this package.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from loadtest.traffic.scenario import Targets
from scheduler.config import shipped_tiers_path

Document = dict[str, Any]  # the content of a tiers file

# Values of `service_tier` that are served by a tier above the default tier, in loads with three classes.
PREMIUM_SERVICE_TIERS = ("priority", "fast")
INTERACTIVE, BULK = "interactive", "bulk"
BOTH = (INTERACTIVE, BULK)
OURS_ALONE, BULK_ALONE, FIRST_COME, STRICT, AIMD, OURS = "A0", "A1", "A2", "A3", "A5", "OURS"
BEST_EFFORT = "BE"
BULK_SHIPPED, UNLIMITED = "B0", "FREE"
SLOWDOWN = "S"  # S1.25: our tiers with a `max_slowdown` of 1.25
PEER_ALONE, PEER_BULK, PEER = "X0", "XB", "X1"
OUR_TIERS = (OURS_ALONE, BULK_SHIPPED, BEST_EFFORT, OURS, UNLIMITED)
OWN_ARMS = (BULK_ALONE, FIRST_COME, STRICT, AIMD, *OUR_TIERS)
TITLES = {
    OURS_ALONE: "interactive alone",
    BULK_ALONE: "bulk alone",
    BULK_SHIPPED: "bulk alone, as configured",
    FIRST_COME: "first come, first served",
    STRICT: "strict priority only",
    AIMD: "feedback (AIMD) only",
    BEST_EFFORT: "best effort: no deadlines told",
    OURS: "Tidegate",
    UNLIMITED: "Tidegate without limits on bulk",
    PEER_ALONE: "peer, interactive alone",
    PEER_BULK: "peer, bulk alone",
    PEER: "peer, with its priorities",
}
_FILES = {
    BULK_ALONE: "a3-strict-priority",  # these tiers do not limit bulk, so the engine runs at its full rate
    FIRST_COME: "a2-first-come",
    STRICT: "a3-strict-priority",
    AIMD: "a5-aimd",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of an experiment.

    `roles` are the kinds of traffic that the arm sends: interactive, bulk or both. `tiers` is None for an arm of the
    peer, which has no tiers. `omitted` names fields of the scenario's requests that the arm does not send.
    """

    name: str
    roles: tuple[str, ...]
    tiers: Document | None
    omitted: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The arm's description in a report; empty if its name says everything."""
        slowdown = slowdown_of(self.name)
        return TITLES.get(self.name, "" if slowdown is None else f"max_slowdown {slowdown:g}")

    @property
    def is_peer(self) -> bool:
        return self.tiers is None

    @property
    def is_mixed(self) -> bool:
        return self.roles == BOTH

    @property
    def alone(self) -> str:
        """The name of the arm that this arm's latencies are compared with."""
        return PEER_ALONE if self.is_peer else OURS_ALONE


def read_arm_file(name: str) -> Document:
    """Return the tiers document in `bench/isolation/arms/<name>.yaml`."""
    text = (files("bench") / "isolation" / "arms" / f"{name}.yaml").read_text(encoding="utf-8")
    document: Document = yaml.safe_load(text)
    return document


def read_shipped_tiers() -> Document:
    document: Document = yaml.safe_load(shipped_tiers_path().read_text(encoding="utf-8"))
    return document


@dataclass(frozen=True, slots=True)
class ArmBuilder:
    """A builder of arms.

    `ours` is the tiers document of Tidegate's own arms. `slo` replaces the SLOs in all arms that try to keep them.
    If `premium` is given, requests with `priority` or `fast` get a tier above the default tier, and `premium` holds the
    SLO values of that tier.
    """

    ours: Document
    slo: Targets
    premium: Mapping[str, float] | None = None

    def build(self, name: str) -> Arm:
        if name in (PEER_ALONE, PEER_BULK, PEER):
            return Arm(name, _roles(name), None)
        slowdown = slowdown_of(name)
        is_ours = name in OUR_TIERS or slowdown is not None
        keeps_slo = is_ours or name == AIMD
        tiers = self.ours if is_ours else read_arm_file(_FILES[name])
        if keeps_slo:
            tiers = with_slo(tiers, self.slo)
        if slowdown is not None:
            tiers = with_max_slowdown(tiers, slowdown)
        if name == UNLIMITED:
            tiers = without_limit(tiers)
        if self.premium is not None and name != FIRST_COME:  # A2 has one tier for all requests
            tiers = with_premium_tier(tiers, self.premium if keeps_slo else {})
        return Arm(name, _roles(name), tiers, ("deadline_ms",) if name == BEST_EFFORT else ())

    def build_all(self, wanted: Sequence[str]) -> list[Arm]:
        """Return the wanted arms in the order of the report."""
        return [self.build(name) for name in sorted(set(wanted), key=_place)]


def slowdown_of(name: str) -> float | None:
    """Return the `max_slowdown` that an arm such as S1.25 sets; None for other arms."""
    found = re.fullmatch(rf"{SLOWDOWN}([1-9]\d*(?:\.\d+)?)", name)
    return None if found is None else float(found[1])


def _place(name: str) -> tuple[int, float]:
    """Return where an arm stands in a report: arms with a `max_slowdown` before those without limits on bulk."""
    names = list(TITLES)
    slowdown = slowdown_of(name)
    return (names.index(name), 0.0) if slowdown is None else (names.index(OURS), slowdown)


def _roles(name: str) -> tuple[str, ...]:
    if name in (OURS_ALONE, PEER_ALONE):
        return (INTERACTIVE,)
    return (BULK,) if name in (BULK_ALONE, BULK_SHIPPED, PEER_BULK) else BOTH


def without_limit(document: Document) -> Document:
    """Return the document with steps that interactive deadlines do not limit, in which bulk has its full rate."""
    changed = deepcopy(document)
    changed["controller"] = {**(changed.get("controller") or {}), "feed_forward": False}
    return changed


def with_max_slowdown(document: Document, value: float) -> Document:
    """Return the document in which every tier with an SLO has this `max_slowdown`."""
    changed = deepcopy(document)
    for tier in changed["tiers"].values():
        if has_slo(tier):
            tier["max_slowdown"] = value
    return changed


def with_slo(document: Document, slo: Targets) -> Document:
    """Return the document in which every tier with an SLO has the targets of `slo`. Targets of None are unchanged."""
    changed = deepcopy(document)
    said = {"ttft_p99_ms": slo.ttft_ms, "itl_p99_ms": slo.itl_ms}
    for tier in changed["tiers"].values():
        if has_slo(tier):
            tier["slo"] |= {key: value for key, value in said.items() if value is not None}
    return changed


def has_slo(tier: Document) -> bool:
    return any(value is not None for value in (tier.get("slo") or {}).values())


def with_premium_tier(document: Document, slo: Mapping[str, float]) -> Document:
    """Return the document with a new tier above the default tier, for `priority` and `fast`.

    If the default tier has an SLO, the new tier has the same SLO, except that the values in `slo` replace its values.
    Loads with three classes use the new tier.
    """
    changed = deepcopy(document)
    base = changed["tiers"][changed["default_tier"]]
    taken = [s for s in base.get("service_tiers", []) if s in PREMIUM_SERVICE_TIERS]
    base["service_tiers"] = [s for s in base["service_tiers"] if s not in taken]
    premium = deepcopy(base) | {"priority": base["priority"] + 100, "service_tiers": taken}
    premium.pop("name", None)
    if has_slo(base):
        premium["slo"] = base["slo"] | dict(slo)
    changed["tiers"] = {"premium": premium, **changed["tiers"]}
    return changed
