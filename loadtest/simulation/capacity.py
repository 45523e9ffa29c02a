"""The fewest workers, or the highest rate, with which every SLO is kept. By bisection.

Each probe is a whole simulated run. Knows summaries; not how a run is made. Assumes that SLOs fail at one point as load
grows; every probe is reported, so that a reader sees where that does not hold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from loadtest.simulation.summary import Summary

MOST_WORKERS = 1024  # where the search gives up
IDLE_SHARE = 0.02  # engine utilisation below which more workers do not help to keep an SLO
RATE_BOUNDS = (1 / 64, 64.0)
RATE_WIDTH = 0.05  # relative width at which the search for the rate ends

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Probe(Generic[T]):
    amount: T  # workers, or multiple of the load
    summary: Summary


@dataclass(frozen=True, slots=True)
class Capacity(Generic[T]):
    """`best` is the last amount that keeps every SLO; None where none within bounds does."""

    probes: list[Probe[T]]
    best: Probe[T] | None


def fewest_workers(run: Callable[[int], Summary], most: int = MOST_WORKERS) -> Capacity[int]:
    """Return the fewest workers: doubled from one until all SLOs are kept, then bisected."""
    probes: list[Probe[int]] = []
    broken, workers = 0, 1
    best = _probe(run, workers, probes)
    while best is None and workers < most and probes[-1].summary.engines.busy_share > IDLE_SHARE:
        broken, workers = workers, min(2 * workers, most)
        best = _probe(run, workers, probes)
    while best is not None and best.amount - broken > 1:
        middle = (best.amount + broken) // 2
        kept = _probe(run, middle, probes)
        best, broken = (kept, broken) if kept is not None else (best, middle)
    return Capacity(probes, best)


def highest_rate(run: Callable[[float], Summary]) -> Capacity[float]:
    """Return the highest rate: doubled from one until an SLO fails, or halved until all are kept, then bisected."""
    lowest, highest = RATE_BOUNDS
    probes: list[Probe[float]] = []
    rate, broken = 1.0, None
    best = _probe(run, rate, probes)
    while best is not None and broken is None and rate < highest:
        rate *= 2
        kept = _probe(run, rate, probes)
        best, broken = (best, rate) if kept is None else (kept, None)
    while best is None and rate > lowest:
        broken, rate = rate, rate / 2
        best = _probe(run, rate, probes)
    while best is not None and broken is not None and broken - best.amount > RATE_WIDTH * best.amount:
        middle = (best.amount + broken) / 2
        kept = _probe(run, middle, probes)
        best, broken = (kept, broken) if kept is not None else (best, middle)
    return Capacity(probes, best)


def _probe(run: Callable[[T], Summary], amount: T, probes: list[Probe[T]]) -> Probe[T] | None:
    """Run one probe and record it. Return it where every SLO is kept, else None."""
    probe = Probe(amount, run(amount))
    probes.append(probe)
    return probe if probe.summary.keeps_slos else None
