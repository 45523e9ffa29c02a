"""The arrival processes of a scenario: a rate and how it changes, or a backlog that never ends.

Validated declarations, pure. Knows the parameters of each process; `workload_arrivals` draws the times. A rate is that
of one population of clients; `clients` multiplies or thins it, and never compresses time.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Drift(Strict):
    """A rate that wanders: every `every_s` it is multiplied by exp(x − σ²/2).

    x is a stationary AR(1) process with standard deviation `sigma`, and correlation `rho` between intervals. The mean
    factor is 1.
    """

    sigma: float = Field(gt=0, le=2)
    rho: float = Field(ge=0, lt=1)
    every_s: float = Field(default=60.0, gt=0)


class Bursts(Strict):
    """On and off for exponential times. Each burst has its own rate: exp(sigma·N − sigma²/2) times the rate for which
    the long-run mean is `rate_per_s` (with `sigma` 0.9 the factor is exp(0.9·N − 0.405))."""

    on_s: float = Field(gt=0)
    off_s: float = Field(gt=0)
    sigma: float = Field(default=0.0, ge=0, le=3)


class Phase(Strict):
    """A part of a repeating cycle: `factor` times the rate for `for_s`."""

    for_s: float = Field(gt=0)
    factor: float = Field(ge=0, le=100)


class Spike(Strict):
    """One spike: `factor` times the rate of the moment, from `at_s` for `for_s`."""

    at_s: float = Field(ge=0)
    for_s: float = Field(gt=0)
    factor: float = Field(gt=0, le=1000)


class OpenLoop(Strict):
    """Arrivals that do not wait for answers, with gamma-distributed gaps; `cv` 1 is a Poisson process, more is
    burstier.

    All `clients` share the changing rate; each client has gaps of its own, and a fraction of a client is that client
    thinned.
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
        """The rate of all clients, over whole cycles and without spikes."""
        return self.rate_per_s * self.clients * self._mean_cycle

    @property
    def _mean_cycle(self) -> float:
        length_s = sum(p.for_s for p in self.cycle)
        return sum(p.for_s * p.factor for p in self.cycle) / length_s if length_s else 1.0

    def scaled(self, factor: float) -> Self:
        """Return `factor` times the load, with more clients or by thinning them."""
        return self.model_copy(update={"clients": self.clients * factor})

    def steady(self) -> Self:
        """Return the same gaps at a constant rate."""
        return self.model_copy(update={"drift": None, "bursts": None, "cycle": (), "spikes": ()})


class ClosedLoop(Strict):
    """A backlog: `streams` requests are always in flight; each answer starts the next one."""

    streams: int = Field(ge=1, le=900)
