"""The result of an experiment, from which its report is made, and the data of its JSON file.

The JSON lists every request, so that the simulator can run the same load and be compared with the measurement. Knows
how results are named in JSON; computes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bench.isolation.arms import Document
from bench.isolation.slos import has_met
from bench.isolation.controls import Control
from bench.isolation.experiments import Experiment
from bench.isolation.goals import Goal
from bench.isolation.tuning import Goodput
from bench.isolation.rounds import Part, Rounds
from bench.isolation.summary import ArmSummary, Comparison, compare_all
from loadtest.checks.report import summary_as_dict
from loadtest.client.answer import Outcome
from loadtest.client.runner import OVERFLOW, Timing
from loadtest.traffic.scenario import Scenario, Targets


@dataclass(slots=True)
class Result:
    """The result of an experiment: its configuration, its measurements, and its verdicts on goals and controls."""

    experiment: Experiment
    scenario: Scenario  # as it was sent, with lengths and load scaled
    length_scale: float
    load: float  # the base load, in multiples of `clients`
    clients: float  # the solo goodput, or the value given in its place, in multiples of the scenario's load
    timing: Timing
    slos: Mapping[str, Targets]
    rounds: Rounds
    arms: dict[str, ArmSummary]
    goals: list[Goal]
    controls: list[Control]
    goodput: Goodput | None = None  # the search for the solo goodput; None if `clients` was given
    explained: dict[str, Any] | None = None  # GET /admin/sla after the last of our own parts
    warnings: list[str] = field(default_factory=list)

    @property
    def solo_load(self) -> float | None:
        """The base load as a share of the solo goodput; None if the solo goodput is not known."""
        return self.load if self.goodput is not None and self.goodput.clients else None

    @property
    def has_answers(self) -> bool:
        """Whether every arm received tokens for every traffic class of which it sent requests."""
        summaries = [s for arm in self.arms.values() for s in arm.classes.values()]
        return bool(summaries) and all(s.answered > 0 for s in summaries if s.offered)

    @property
    def has_jobs(self) -> bool:
        """Whether the experiment sent jobs, which are bulk requests with deadlines."""
        return any(arm.jobs.offered for arm in self.arms.values())


def as_dict(result: Result) -> dict[str, Any]:
    comparisons = compare_all(result.arms)
    return {
        "experiment": result.experiment.name,
        "scenario": result.scenario.model_dump(mode="json"),
        "length_scale": result.length_scale,
        "load": result.load,
        "clients": result.clients,
        "clients_given": result.goodput is None,
        "timing": asdict(result.timing),
        "promises": {name: t.model_dump() for name, t in result.slos.items()},
        "solo_goodput": None if result.goodput is None else _goodput_as_dict(result.goodput),
        "arms": {name: _arm_as_dict(arm) for name, arm in result.arms.items()},
        "versus_alone": {name: _comparison_as_dict(c) for name, c in comparisons.items()},
        "goals": [_goal_as_dict(g) for g in result.goals],
        "negative_controls": [asdict(c) for c in result.controls],
        "admin_sla": result.explained,
        "warnings": result.warnings,
        "requests": requests_of(result.rounds, result.slos),
    }


def _goodput_as_dict(goodput: Goodput) -> dict[str, Any]:
    probes = [asdict(p) | {"attainment": p.attainment, "holds": p.holds} for p in goodput.probes]
    return asdict(goodput) | {"probes": probes, "attainment_at_least": goodput.at_least}


def _arm_as_dict(arm: ArmSummary) -> dict[str, Any]:
    return {
        "title": arm.arm.title,
        "tiers": arm.arm.tiers,
        "classes": {name: summary_as_dict(summary) for name, summary in arm.classes.items()},
        "attainment": {name: asdict(a) | {"share": a.share} for name, a in arm.attainment.items()},
        "jobs": asdict(arm.jobs) | {"share": arm.jobs.share},
        "interactive_met_per_s": arm.met_per_s,
        "bulk_tokens_per_s": arm.bulk_tokens_per_s,
        "engine": asdict(arm.engine),
        "client": {"lag_p99_s": arm.lag_p99_s, "cpu_share": arm.client_cpu_share},
    }


def _comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    bulk = {"bulk_kept": comparison.bulk_kept, "bulk_harvest": comparison.bulk_harvest}
    return asdict(comparison.latency) | bulk


def _goal_as_dict(goal: Goal) -> dict[str, Any]:
    return asdict(goal) | {"value": goal.value, "verdict": goal.verdict}


def requests_of(rounds: Rounds, slos: Mapping[str, Targets]) -> list[dict[str, Any]]:
    """Return the requests of all parts as JSON. Arrivals are seconds from the part's start.

    Requests that the client could not send are left out.
    """
    found = []
    for name, parts in rounds.parts.items():
        for part in parts:
            for outcomes in part.run.outcomes.values():
                found += [_request(name, part, outcome, slos) for outcome in outcomes if outcome.error != OVERFLOW]
    return found


def _request(arm: str, part: Part, outcome: Outcome, slos: Mapping[str, Targets]) -> dict[str, Any]:
    targets = slos.get(outcome.traffic_class)
    return {
        "arm": arm,
        "round": part.round_,
        "class": outcome.traffic_class,
        "index": outcome.index,
        "tier": outcome.service_tier,
        "arrival_s": _rounded(outcome.due_s - part.run.start_s),
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.completion_tokens,
        "ttft_s": _rounded(outcome.ttft_s),
        "e2e_s": _rounded(outcome.e2e_s),
        "gaps_s": _gaps(outcome.inter_token_s()),
        "met": None if targets is None else has_met(outcome, targets),
        "error": outcome.error,
    }


def _gaps(gaps: Sequence[float]) -> dict[str, float] | None:
    if not gaps:
        return None
    p50, p99 = np.quantile(gaps, [0.5, 0.99])
    named = {"mean": float(np.mean(gaps)), "p50": float(p50), "p99": float(p99), "max": max(gaps)}
    return {name: round(value, 6) for name, value in named.items()}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def tiers_used(result: Result) -> dict[str, Document]:
    return {name: arm.arm.tiers for name, arm in result.arms.items() if arm.arm.tiers is not None}
