"""What a scenario can say about when requests come: a rate, how it moves, or a backlog that never ends.

Pure declarations, validated. Knows the parameters of each process; how times are drawn is `workload_arrivals`.
A rate is that of one population of clients; `clients` multiplies or thins it, and never squeezes time.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Drift(Strict):
    """The rate wanders: every `every_s` it is multiplied by exp(x − σ²/2), x a stationary AR(1) with standard
    deviation `sigma` and correlation `rho` from one interval to the next. The mean factor is 1."""

    sigma: float = Field(gt=0, le=2)
    rho: float = Field(ge=0, lt=1)
    every_s: float = Field(default=60.0, gt=0)


class Bursts(Strict):
    """On and off for exponential times. Each burst has a rate of its own: exp(sigma·N − sigma²/2) times what makes the
    long-run mean `rate_per_s` (with `sigma` 0.9 that is exp(0.9·N − 0.405))."""

    on_s: float = Field(gt=0)
    off_s: float = Field(gt=0)
    sigma: float = Field(default=0.0, ge=0, le=3)


class Phase(Strict):
    """A part of a cycle that repeats: `factor` times the rate for `for_s`."""

    for_s: float = Field(gt=0)
    factor: float = Field(ge=0, le=100)


class Spike(Strict):
    """Once: `factor` times the rate (whatever phase it meets) from `at_s` for `for_s`."""

    at_s: float = Field(ge=0)
    for_s: float = Field(gt=0)
    factor: float = Field(gt=0, le=1000)


class OpenLoop(Strict):
    """Arrivals that do not wait for answers: gamma-distributed gaps. `cv` 1 is a Poisson process, more is burstier.
    The moving rate is shared by all `clients`; each client's gaps are its own, and a part of a client is that
    client thinned."""

    rate_per_s: float = Field(gt=0, le=10_000)
    cv: float = Field(default=1.0, gt=0, le=20)
    clients: float = Field(default=1.0, gt=0, le=10_000)
    drift: Drift | None = None
    bursts: Bursts | None = None
    cycle: tuple[Phase, ...] = ()
    spikes: tuple[Spike, ...] = ()

    @property
    def mean_rate_per_s(self) -> float:
        """Of all clients, over whole cycles and without spikes."""
        return self.rate_per_s * self.clients * self._mean_cycle

    @property
    def _mean_cycle(self) -> float:
        length_s = sum(p.for_s for p in self.cycle)
        return sum(p.for_s * p.factor for p in self.cycle) / length_s if length_s else 1.0

    def scaled(self, factor: float) -> Self:
        """`factor` times the load, by adding clients or thinning them."""
        return self.model_copy(update={"clients": self.clients * factor})

    def steady(self) -> Self:
        """The same gaps at a rate that does not move."""
        return self.model_copy(update={"drift": None, "bursts": None, "cycle": (), "spikes": ()})


class ClosedLoop(Strict):
    """A backlog: `streams` requests are always in flight; each answer starts the next one."""

    streams: int = Field(ge=1, le=900)
