"""The arrival processes of a scenario: open loops, with a rate and its changes over time, and closed loops.

Holds validated declarations only; all functions are pure. Knows the parameters of each process; `workload_arrivals`
draws the times. `rate_per_s` is the rate of one client. The load is changed with the number of clients: time is never
compressed.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Drift(Strict):
    """A random drift of the rate: in each interval of `every_s` seconds the rate is multiplied by exp(x − σ²/2).

    x is a stationary AR(1) process. Its standard deviation σ is `sigma`, and the correlation between neighbouring
    intervals is `rho`. The mean of the factor is 1.
    """

    sigma: float = Field(gt=0, le=2)
    rho: float = Field(ge=0, lt=1)
    every_s: float = Field(default=60.0, gt=0)


class Bursts(Strict):
    """Alternating bursts and pauses, of exponentially distributed lengths with the means `on_s` and `off_s`.

    No request arrives during a pause. The rate inside bursts is raised so that the long-run mean stays the same. In
    addition, each burst multiplies the rate by a factor of its own: exp(sigma·N − sigma²/2) for a standard normal N,
    which is exp(0.9·N − 0.405) for `sigma` 0.9.
    """

    on_s: float = Field(gt=0)
    off_s: float = Field(gt=0)
    sigma: float = Field(default=0.0, ge=0, le=3)


class Phase(Strict):
    """One part of a repeating cycle: for `for_s` seconds, the rate is multiplied by `factor`."""

    for_s: float = Field(gt=0)
    factor: float = Field(ge=0, le=100)


class Spike(Strict):
    """A single spike: from `at_s`, for `for_s` seconds, the current rate is multiplied by `factor`."""

    at_s: float = Field(ge=0)
    for_s: float = Field(gt=0)
    factor: float = Field(gt=0, le=1000)


class OpenLoop(Strict):
    """Arrivals that do not wait for answers, with gamma-distributed gaps.

    `cv` is the coefficient of variation of the gaps: 1 is a Poisson process, and larger values are burstier. All
    `clients` follow the same changing rate, but each client draws its own gaps. A fractional part of `clients` adds one
    client that sends only this share of its requests.
    """

    rate_per_s: float = Field(gt=0, le=10_000)
    cv: float = Field(default=1.0, gt=0, le=20)
    clients: float = Field(default=1.0, gt=0, le=10_000)
    drift: Drift | None = None
    bursts: Bursts | None = None
    cycle: tuple[Phase, ...] = ()
    spikes: tuple[Spike, ...] = ()

    @property
    def mean_rate_per_s(self) -> float:
        """The mean rate of all clients together, over whole cycles and without spikes."""
        return self.rate_per_s * self.clients * self._mean_cycle

    @property
    def _mean_cycle(self) -> float:
        length_s = sum(p.for_s for p in self.cycle)
        return sum(p.for_s * p.factor for p in self.cycle) / length_s if length_s else 1.0

    def scaled(self, factor: float) -> Self:
        """Return a copy with `factor` times the load: the number of clients is multiplied by `factor`."""
        return self.model_copy(update={"clients": self.clients * factor})

    def steady(self) -> Self:
        """Return a copy with the same distribution of gaps at a constant rate."""
        return self.model_copy(update={"drift": None, "bursts": None, "cycle": (), "spikes": ()})


class ClosedLoop(Strict):
    """`streams` requests are always in flight, and each answer starts the next request.

    In a bulk class this is an endless backlog; in an interactive class, clients that each wait for their answer.
    """

    streams: int = Field(ge=1, le=900)

    def scaled(self, factor: float) -> Self:
        """Return a copy with `factor` times the streams, but at least one."""
        return self.model_copy(update={"streams": max(1, round(self.streams * factor))})
