"""The negative controls: arms that lack a mechanism of Tidegate and therefore must fail. Pure.

If a control does not fail, the experiment proves nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.isolation.arms import BEST_EFFORT, FIRST_COME
from bench.isolation.experiments import ExperimentName
from bench.isolation.summary import ArmSummary, compare_all

TTFT_P50_TARGET, TTFT_P99_TARGET = 1.3, 1.25  # largest ratios, mixed ÷ alone; the control A2 must exceed both


@dataclass(frozen=True, slots=True)
class Control:
    """The outcome of a negative control. `failed` is None if the control was not run."""

    name: str
    failed: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """The measurements of one experiment by which its goals and controls are judged.

    `solo_load` is the base load as a share of the solo goodput; None if the solo goodput was not measured. `top_class`
    is the interactive class of the highest tier.
    """

    experiment: ExperimentName
    arms: Mapping[str, ArmSummary]
    solo_load: float | None = None
    factor: float = 1.0  # multiple of the base load while the load is raised
    higher_for_s: float = 0.0  # seconds of raised load in each round
    on_gpu: bool = False
    top_class: str = ""


def controls_of(seen: Evidence) -> list[Control]:
    """Return the negative controls of this experiment, with their outcomes."""
    match seen.experiment:
        case "isolation":
            return _isolation_controls(seen)
        case "deadlines":
            return _deadline_controls(seen)
        case "overload" | "frontier":
            return []


def _deadline_controls(seen: Evidence) -> list[Control]:
    name = "best effort misses a fifth of the deadlines or more"
    share = seen.arms[BEST_EFFORT].jobs.share if BEST_EFFORT in seen.arms else None
    if share is None:
        return [Control(name, None, "not run")]
    return [Control(name, share <= 0.8, f"{1 - share:.1%} missed")]


def _isolation_controls(seen: Evidence) -> list[Control]:
    name = "A2 fails isolation"
    if FIRST_COME not in seen.arms:
        return [Control(name, None, "not run")]
    versus = compare_all(seen.arms).get(FIRST_COME)
    p50, p99 = (versus.latency.ttft_p50, versus.latency.ttft_p99) if versus else (None, None)
    if p50 is None or p99 is None:
        return [Control(name, None, "no first tokens to compare")]
    failed = p50.value > TTFT_P50_TARGET and p99.value > TTFT_P99_TARGET
    return [Control(name, failed, f"TTFT p50 {p50.value:.2f}×, p99 {p99.value:.2f}×")]
