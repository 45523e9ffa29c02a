"""Search for the fewest workers, or for the highest rate, with which every SLO is kept. It works by bisection.

Each probe is a whole simulated run. The search assumes that there is one limit: SLOs are kept below this load and fail
above it. Every probe is reported, so that a reader sees if this is not the case. Knows summaries; does not know how a
run is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from loadtest.simulation.summary import Summary

MOST_WORKERS = 1024  # the search gives up at this number
IDLE_SHARE = 0.02  # engine utilisation below which more workers do not help to keep an SLO
RATE_BOUNDS = (1 / 64, 64.0)  # lowest and highest factor on the load that the search tries
RATE_WIDTH = 0.05  # the search for the rate ends at this relative distance between kept and failed rate

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Probe(Generic[T]):
    """One simulated run of the search. `amount` is the number of workers, or the factor on the load."""

    amount: T  # number of workers, or factor on the load
    summary: Summary


@dataclass(frozen=True, slots=True)
class Capacity(Generic[T]):
    """The result of a search.

    `best` is the probe with the fewest workers, or the highest rate, that keeps every SLO; None if no probe keeps every
    SLO.
    """

    probes: list[Probe[T]]
    best: Probe[T] | None


def fewest_workers(run: Callable[[int], Summary], most: int = MOST_WORKERS) -> Capacity[int]:
    """Search for the fewest workers that keep every SLO, up to `most` workers.

    The number of workers is doubled from one until all SLOs are kept, and then bisected.
    """
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
    """Search for the highest rate that keeps every SLO, within `RATE_BOUNDS`.

    The rate is doubled from one until an SLO fails, or halved until all SLOs are kept, and then bisected.
    """
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
    """Run one probe and append it to `probes`. Return the probe if it keeps every SLO, else None."""
    probe = Probe(amount, run(amount))
    probes.append(probe)
    return probe if probe.summary.keeps_slos else None
