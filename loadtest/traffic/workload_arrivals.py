"""Draw arrival times from a seed: a renewal process with a rate that changes over time. All functions are pure.

Knows step functions of time and gamma-distributed gaps. Gaps of mean 1 are drawn in *operational* time, which is the
integral of the rate over seconds, and are then mapped back to seconds. So every rate profile keeps the requested
burstiness.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.traffic.scenario_arrivals import Bursts, Drift, OpenLoop, Phase, Spike


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A step function of time: its value is `values[i]` on [edges[i], edges[i + 1]).

    There is one more edge than there are values.
    """

    edges: np.ndarray
    values: np.ndarray

    def at(self, times: np.ndarray) -> np.ndarray:
        """Return the values at `times`, which must lie within the edges."""
        index = np.searchsorted(self.edges, times, side="right") - 1
        found: np.ndarray = self.values[np.minimum(index, len(self.values) - 1)]
        return found

    @property
    def cumulated(self) -> np.ndarray:
        """The integral from the first edge to each edge."""
        return np.concatenate([[0.0], np.cumsum(np.diff(self.edges) * self.values)])

    def inverse(self, integrals: np.ndarray) -> np.ndarray:
        """Return the times at which the integral from the first edge reaches each of `integrals`.

        Each of `integrals` must be below the total integral.
        """
        total = self.cumulated
        # While the rate is 0, the integral is constant; "right" finds the end of such a pause, not its beginning.
        index = np.searchsorted(total, integrals, side="right") - 1
        times: np.ndarray = self.edges[index] + (integrals - total[index]) / self.values[index]
        return times


def sample_rate(arrivals: OpenLoop, duration_s: float, rng: np.random.Generator) -> StepFunction:
    """Return the rate of one client over [0, duration_s) in requests per second: the product of all its changes."""
    # Drift and bursts draw from separate streams, so that removing one of them does not change the other.
    drift_rng, burst_rng = rng.spawn(2)
    motions = [StepFunction(np.array([0.0, duration_s]), np.array([arrivals.rate_per_s]))]
    if arrivals.drift is not None:
        motions.append(_drifting(arrivals.drift, duration_s, drift_rng))
    if arrivals.bursts is not None:
        motions.append(_bursting(arrivals.bursts, duration_s, burst_rng))
    if arrivals.cycle:
        motions.append(_cycling(arrivals.cycle, duration_s))
    motions += [_spiking(spike, duration_s) for spike in arrivals.spikes]
    edges = np.unique(np.concatenate([m.edges[m.edges < duration_s] for m in motions] + [[duration_s]]))
    return StepFunction(edges, np.prod([m.at(edges[:-1]) for m in motions], axis=0))


def sample_arrivals(rate: StepFunction, cv: float, rng: np.random.Generator) -> np.ndarray:
    """Return the arrival times of one client, in ascending order, within the edges of `rate`.

    Gaps are gamma-distributed in operational time, with coefficient of variation `cv`. The process starts at a random
    point of its first gap, so that short runs have the right rate too.
    """
    total = float(rate.cumulated[-1])
    if total <= 0:
        return np.empty(0)
    shape, scale = cv**-2, cv**2
    # The gap that contains time 0 is length-biased: its gamma distribution has a shape that is larger by 1.
    points = [np.array([rng.gamma(shape + 1.0, scale) * rng.random()])]
    while points[-1][-1] < total:
        gaps = rng.gamma(shape, scale, size=max(16, int(total)))
        points.append(points[-1][-1] + np.cumsum(gaps))
    grown = np.concatenate(points)
    return rate.inverse(grown[grown < total])


def _drifting(drift: Drift, duration_s: float, rng: np.random.Generator) -> StepFunction:
    intervals = int(np.ceil(duration_s / drift.every_s))
    noise = rng.standard_normal(intervals)
    x = np.empty(intervals)
    x[0] = noise[0]
    for i in range(1, intervals):
        x[i] = drift.rho * x[i - 1] + np.sqrt(1 - drift.rho**2) * noise[i]
    edges = drift.every_s * np.arange(intervals + 1)
    return StepFunction(edges, np.exp(drift.sigma * x - drift.sigma**2 / 2))


def _bursting(bursts: Bursts, duration_s: float, rng: np.random.Generator) -> StepFunction:
    share_on = bursts.on_s / (bursts.on_s + bursts.off_s)
    # The exponential distribution has no memory, so the run may start inside a burst or a pause.
    is_on = bool(rng.random() < share_on)
    edges, values = [0.0], []
    while edges[-1] < duration_s:
        edges.append(edges[-1] + float(rng.exponential(bursts.on_s if is_on else bursts.off_s)))
        height = float(np.exp(bursts.sigma * rng.standard_normal() - bursts.sigma**2 / 2))
        values.append(height / share_on if is_on else 0.0)
        is_on = not is_on
    return StepFunction(np.array(edges), np.array(values))


def _cycling(cycle: Sequence[Phase], duration_s: float) -> StepFunction:
    repeats = int(np.ceil(duration_s / sum(p.for_s for p in cycle)))
    lengths = np.tile([p.for_s for p in cycle], repeats)
    return StepFunction(np.concatenate([[0.0], np.cumsum(lengths)]), np.tile([p.factor for p in cycle], repeats))


def _spiking(spike: Spike, duration_s: float) -> StepFunction:
    """Return a step function that is the spike's factor during the spike, and 1 in the rest of the run."""
    edges = np.unique(np.clip([0.0, spike.at_s, spike.at_s + spike.for_s, duration_s], 0.0, duration_s))
    inside = (edges[:-1] >= spike.at_s) & (edges[:-1] < spike.at_s + spike.for_s)
    return StepFunction(edges, np.where(inside, spike.factor, 1.0))


def whole_and_part(clients: float) -> list[float]:
    """Split a fractional number of clients into one number for each client: its share of the planned requests.

    For example, 2.3 clients give [1.0, 1.0, 0.3]: the third client sends only 30 % of its requests.
    """
    whole = int(clients)
    part = clients - whole
    return [1.0] * whole + ([part] if part > 1e-9 else [])
