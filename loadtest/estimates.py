"""Quantiles with confidence intervals, and the statistics of an arm's outcomes. All functions are pure.

Knows samples; does not know how results are shown. Intervals are 95 % bootstrap percentiles. The bootstrap treats
samples as independent. A quantile of few samples has a wide interval.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from loadtest.client.runner import UNFINISHED, ArmRun

QUANTILES = (0.5, 0.95, 0.99)
RESAMPLES = 400  # number of bootstrap resamples for an interval
BOOTSTRAP_SEED = 20_240_601  # fixed, so that the same samples have the same interval
# A larger set of samples is reduced to this number at random, which keeps the bootstrap fast.
MAX_BOOTSTRAP_SAMPLES = 20_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Distribution:
    """A set of samples in seconds, with quantiles and their confidence intervals."""

    samples: np.ndarray

    def quantile(self, q: float) -> Estimate | None:
        if len(self.samples) == 0:
            return None
        low, high = np.quantile(self.resampled(q), [0.025, 0.975])
        return Estimate(float(np.quantile(self.samples, q)), float(low), float(high))

    def resampled(self, q: float) -> np.ndarray:
        """Return quantile `q` of each of `RESAMPLES` bootstrap resamples. `q` is one of `QUANTILES`."""
        column: np.ndarray = self._resampled[:, QUANTILES.index(q)]
        return column

    @cached_property
    def _resampled(self) -> np.ndarray:
        """The quantiles of all bootstrap resamples, as an array of shape (RESAMPLES, len(QUANTILES)).

        The resamples are drawn from a fixed seed, so that the same samples have the same interval.
        """
        rng = np.random.default_rng(BOOTSTRAP_SEED)
        drawn = self.samples
        if len(drawn) > MAX_BOOTSTRAP_SAMPLES:
            drawn = rng.choice(drawn, MAX_BOOTSTRAP_SAMPLES, replace=False)
        picks = (rng.choice(drawn, len(drawn)) for _ in range(RESAMPLES))
        return np.array([np.quantile(pick, QUANTILES) for pick in picks])

    @property
    def max(self) -> float | None:
        return float(self.samples.max()) if len(self.samples) else None


def ratio(above: Distribution, below: Distribution, q: float) -> Estimate | None:
    """Return quantile `q` of `above` divided by quantile `q` of `below`, with its interval.

    Both distributions are resampled independently. Return None if a distribution is empty or the divisor is 0.
    """
    over, under = above.quantile(q), below.quantile(q)
    if over is None or under is None or under.value == 0:
        return None
    # Both distributions are resampled with the same seed; a shuffled order makes their pairs independent.
    order = np.random.default_rng(7).permutation(RESAMPLES)
    resampled = above.resampled(q) / np.maximum(below.resampled(q)[order], 1e-9)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(over.value / under.value, float(low), float(high))


class HasLatencies(Protocol):
    """An object with TTFT, ITL and E2E distributions, such as a traffic class or an arm."""

    @property
    def ttft(self) -> Distribution: ...
    @property
    def itl(self) -> Distribution: ...
    @property
    def e2e(self) -> Distribution: ...


@dataclass(frozen=True, slots=True)
class LatencyRatios:
    """The measures of isolation: latencies of interactive traffic with bulk traffic ÷ the same without bulk traffic."""

    ttft_p50: Estimate | None
    ttft_p99: Estimate | None
    itl_p99: Estimate | None
    e2e_p50: Estimate | None
    e2e_p99: Estimate | None


def latency_ratios(beside: HasLatencies, alone: HasLatencies) -> LatencyRatios:
    """Return each latency of `beside` (with bulk traffic) divided by that of `alone` (without bulk traffic)."""
    return LatencyRatios(
        ttft_p50=ratio(beside.ttft, alone.ttft, 0.5),
        ttft_p99=ratio(beside.ttft, alone.ttft, 0.99),
        itl_p99=ratio(beside.itl, alone.itl, 0.99),
        e2e_p50=ratio(beside.e2e, alone.e2e, 0.5),
        e2e_p99=ratio(beside.e2e, alone.e2e, 0.99),
    )


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The results of one traffic class in one arm, over all rounds.

    A request that was given up counts in TTFT and E2E with the time that it had waited. With such requests, the upper
    quantiles are lower bounds of the true ones.
    """

    offered: int
    answered: int  # requests that received tokens, also outside the measured window
    completed: int
    errors: int
    unfinished: int
    ttft: Distribution
    itl: Distribution
    e2e: Distribution
    tokens_per_s: float  # counts only tokens that arrived in the measured window
    answered_as: tuple[str, ...]  # service tiers that the server reported
    error_examples: tuple[str, ...]


def summarize(runs: Sequence[ArmRun], name: str, *, with_lead: bool = False) -> ClassSummary:
    """Return the summary of the class `name` over the runs of one arm.

    Requests that were completed before the measured window are left out. TTFT and ITL use only the requests that began
    in the window, or with `with_lead` the same requests as E2E: also those that began in the lead and ended later.
    """
    sent = [(run, o) for run in runs for o in run.outcomes[name]]
    outcomes = [o for run, o in sent if o.finished_s is None or o.error or o.finished_s >= run.start_s]
    begun = outcomes if with_lead else [o for run, o in sent if o.due_s >= run.start_s]
    tokens = sum(o.tokens_between(run.start_s, run.end_s) for run, o in sent)
    errors = [o.error for o in outcomes if o.error not in (None, UNFINISHED)]
    return ClassSummary(
        offered=len(outcomes),
        answered=sum(bool(o.progress) for _, o in sent),
        completed=sum(o.is_complete for o in outcomes),
        errors=len(errors),
        unfinished=sum(o.error == UNFINISHED for o in outcomes),
        ttft=_distribution(o.ttft_s for o in begun),
        itl=Distribution(np.array([gap for o in begun for gap in o.inter_token_s()])),
        e2e=_distribution(o.e2e_s for o in outcomes if o.is_complete or o.given_up_s is not None),
        tokens_per_s=tokens / sum(run.duration_s for run in runs),
        answered_as=tuple(sorted({o.service_tier for o in outcomes if o.service_tier})),
        error_examples=tuple(sorted({str(e) for e in errors}))[:3],
    )


def harvest(bulk_mixed: float, bulk_alone: float, busy_share_alone: float | None) -> float | None:
    """Return the bulk throughput of the mixed arm, divided by the throughput that interactive traffic leaves for bulk.

    The divisor is `bulk_alone` times the share of engine time that interactive traffic does not use. `busy_share_alone`
    is the share that interactive traffic uses when it runs alone; None if the server does not export it. Return None if
    this share is unknown or at least 1, or if `bulk_alone` is 0.
    """
    if busy_share_alone is None or bulk_alone == 0 or busy_share_alone >= 1:
        return None
    return bulk_mixed / (bulk_alone * (1 - busy_share_alone))


def harvest_limit(slowdown: float, busy_share_alone: float, gain: float = 1.0) -> float:
    """Return the most of its full rate that bulk can get while interactive answers take `slowdown` times as long.

    Interactive requests come at random (Poisson), and use `busy_share_alone` of the engine's time when alone. Slowed
    down, they leave `(1 - busy_share_alone) ** slowdown` of the time to bulk alone. Of the rest, bulk takes
    `1 - 1 / slowdown`, in which it gets `gain` times as much done as alone, because others pay the fixed cost of steps.
    Arrivals are taken to cost bulk nothing: no work is thrown away for them, and no step is shorter because of them.
    """
    alone = math.pow(1 - busy_share_alone, slowdown)
    return min(1.0, alone + (1 - alone) * (1 - 1 / slowdown) * gain)


def busy_share(runs: Sequence[ArmRun]) -> float | None:
    """Return engine time ÷ wall time over the measured windows; None if the engine time of any window is unknown."""
    busy = [run.busy_s for run in runs if run.busy_s is not None]
    return sum(busy) / sum(run.duration_s for run in runs) if len(busy) == len(runs) else None


def lag_p99_s(runs: Iterable[ArmRun]) -> float:
    """Return the p99 of the delays with which the client sent its open-loop requests, in seconds."""
    lags = [lag for run in runs for lag in run.lag_s]
    return float(np.quantile(lags, 0.99)) if lags else 0.0


def pooled(summaries: Mapping[str, ClassSummary], names: Sequence[str]) -> float:
    """Return the tokens per second of the named classes together."""
    return sum(summaries[name].tokens_per_s for name in names)


def _distribution(values: Iterable[float | None]) -> Distribution:
    return Distribution(np.array([v for v in values if v is not None], dtype=np.float64))


MAX_LAG_S = 0.02  # seconds; a client that sends later than this changes the arrival times
MAX_CLIENT_CPU_SHARE = 0.5  # share of a core; a client above it takes CPU time from a server on the same machine


def client_warnings(lag_p99_s: float, cpu_share: float) -> list[str]:
    found = []
    if lag_p99_s > MAX_LAG_S:
        found.append(f"requests were sent up to {1e3 * lag_p99_s:.0f} ms late (p99): the client is slow")
    if cpu_share > MAX_CLIENT_CPU_SHARE:
        found.append(f"the client used {cpu_share:.0%} of a core: it may be the bottleneck")
    return found


def failure_warnings(arm: str, classes: Mapping[str, ClassSummary]) -> list[str]:
    return [
        f"{arm}, {name}: {s.errors} of {s.offered} failed ({'; '.join(s.error_examples)})"
        for name, s in classes.items()
        if s.errors
    ]
