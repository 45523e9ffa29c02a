"""SLO attainment: which requests met their SLO, and how long latencies take to settle after a load step. Pure.

Every share is over *offered* requests: a request that was refused, failed or never ended is a miss. Knows outcomes and
targets; does not know arms.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.client.answer import Outcome
from loadtest.client.runner import ArmRun
from loadtest.traffic.scenario import Targets

GOAL = 0.99  # a load holds if at least this share of its requests meets the SLO
GAP_QUANTILE = 0.99  # the quantile of a request's gaps between tokens that its ITL target limits


def has_met(outcome: Outcome, targets: Targets) -> bool:
    """Return whether the request met its SLO.

    The answer must be complete, and its TTFT, the p99 of its gaps between tokens, and its total time must be within the
    targets.
    """
    if not outcome.is_complete or outcome.ttft_s is None or outcome.e2e_s is None:
        return False
    gaps = outcome.inter_token_s()
    gap_s = float(np.quantile(gaps, GAP_QUANTILE)) if gaps else 0.0
    held = ((targets.ttft_ms, outcome.ttft_s), (targets.itl_ms, gap_s), (targets.e2e_ms, outcome.e2e_s))
    return all(target_ms is None or seconds <= target_ms / 1000 for target_ms, seconds in held)


@dataclass(frozen=True, slots=True)
class Attainment:
    offered: int
    met: int

    @property
    def share(self) -> float | None:
        return self.met / self.offered if self.offered else None

    def __add__(self, other: "Attainment") -> "Attainment":
        return Attainment(self.offered + other.offered, self.met + other.met)


def attainment_of(outcomes: Iterable[Outcome], targets: Targets) -> Attainment:
    verdicts = [has_met(outcome, targets) for outcome in outcomes]
    return Attainment(len(verdicts), sum(verdicts))


class MissCount:
    """A count, while an arm runs, of the requests that have certainly missed their SLO. Counts each request once."""

    def __init__(self, slos: Mapping[str, Targets]) -> None:
        self._slos = slos
        self._seen = dict.fromkeys(slos, 0)
        self._undecided: list[tuple[Outcome, Targets]] = []
        self.misses = 0

    def update(self, run: ArmRun, now_s: float) -> int:
        """Judge all requests that can be judged by now, and return the number of misses so far."""
        for name, targets in self._slos.items():
            fresh = run.outcomes.get(name, [])[self._seen[name] :]
            self._seen[name] += len(fresh)
            self._undecided += [(outcome, targets) for outcome in fresh]
        verdicts = [(outcome, targets, _verdict(outcome, targets, now_s)) for outcome, targets in self._undecided]
        self._undecided = [(outcome, targets) for outcome, targets, met in verdicts if met is None]
        self.misses += sum(met is False for _, _, met in verdicts)
        return self.misses


def _verdict(outcome: Outcome, targets: Targets, now_s: float) -> bool | None:
    """Return whether the request met its SLO; None while that is undecided."""
    if outcome.finished_s is not None or outcome.error is not None:
        return has_met(outcome, targets)
    waited_s = now_s - outcome.due_s
    to_first_s = waited_s if outcome.ttft_s is None else outcome.ttft_s
    overdue = ((targets.ttft_ms, to_first_s), (targets.e2e_ms, waited_s))
    return False if any(target_ms is not None and s > target_ms / 1000 for target_ms, s in overdue) else None


def settling_s(
    outcomes: Sequence[tuple[float, bool]], step_s: float, end_s: float, share: float, bin_s: float
) -> float:
    """Return the seconds from a load step until latencies have settled.

    They have settled when, in every later bin of `bin_s` seconds, at least `share` of the requests met their SLO. If
    that never happens, the result is the whole time from the step to the end. `outcomes` are pairs of arrival time in
    seconds and whether the request met its SLO.
    """
    settled_s = end_s - step_s
    start_s = end_s - bin_s
    while start_s >= step_s - 1e-9:
        inside = [met for at_s, met in outcomes if start_s <= at_s < start_s + bin_s]
        if inside and sum(inside) / len(inside) < share:
            return settled_s
        settled_s = max(0.0, start_s - step_s)
        start_s -= bin_s
    return 0.0
