"""The frontier of an engine: what bulk gets at each value of `max_slowdown`, beside the most that it could get.

A load is simulated with interactive traffic alone, with bulk alone and without limits, and with both at each value. All
functions are pure, except that they run simulations. Does not know flags or text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadtest.estimates import harvest_limit
from loadtest.simulation.experiment import Experiment
from loadtest.simulation.observation import Observation, RequestRecord
from loadtest.simulation.summary import Spread, spread
from loadtest.simulation.traffic import TrafficError
from scheduler.config import TierSet

Run = Callable[[str, Experiment], Observation]  # (what is simulated, in words; the experiment)


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one value of `max_slowdown`. Ratios compare with interactive traffic alone."""

    max_slowdown: float
    slowdown: float  # mean time of whole interactive answers ÷ alone
    ttft_p50: float | None  # ÷ alone
    ttft_p99: float | None  # ÷ alone
    harvest: float  # bulk's tokens ÷ those of bulk alone
    limit: float  # the most that `harvest` could be at `max_slowdown`


@dataclass(frozen=True, slots=True)
class Frontier:
    busy_share: float  # of the engine's time, with interactive traffic alone
    bulk_tokens_per_s: float  # with bulk alone
    gain: float  # what a token of bulk costs with bulk alone ÷ what it adds to a step of others
    points: Sequence[Point]


def find_frontier(experiment: Experiment, values: Sequence[float], run: Run) -> Frontier:
    """Simulate the load at each of the `values`. Raises `TrafficError` if it lacks interactive traffic or bulk."""
    unlimited = experiment.tiers.model_copy(
        update={"controller": experiment.tiers.controller.model_copy(update={"feed_forward": False})}
    )
    chats = run("interactive alone", replace(experiment, role="interactive"))
    bulk = run("bulk alone", replace(experiment, role="bulk", tiers=unlimited))
    answers, full = _answers(chats, experiment.tiers), bulk.tokens.total()
    if not answers or not full:
        raise TrafficError("max_slowdown needs a scenario with interactive requests and with bulk")
    busy_share = sum(e.busy_s for e in chats.engines) / (experiment.duration_s * experiment.workers)
    gain = _gain(bulk, experiment)
    points = []
    for value in values:
        both = run(f"max_slowdown {value:g}", replace(experiment, tiers=_promising(experiment.tiers, value)))
        beside = _answers(both, experiment.tiers)
        pairs = [(beside[name], alone) for name, alone in answers.items() if name in beside]
        if not pairs:
            raise TrafficError("no interactive request was answered both alone and beside bulk: make the load lower")
        ttfts = [spread(r.ttft_s for r in of if r.ttft_s is not None) for of in zip(*pairs, strict=True)]
        points.append(
            Point(
                max_slowdown=value,
                slowdown=sum(_e2e_s(r) for r, _ in pairs) / sum(_e2e_s(r) for _, r in pairs),
                ttft_p50=_ratio(ttfts, lambda s: s.p50),
                ttft_p99=_ratio(ttfts, lambda s: s.p99),
                harvest=sum(both.tokens[name] for name in bulk.tokens) / full,
                limit=harvest_limit(value, busy_share, gain),
            )
        )
    return Frontier(busy_share, full / experiment.duration_s, gain, points)


def _promising(tiers: TierSet, max_slowdown: float) -> TierSet:
    """Return the tiers with this promise in each interactive one."""
    changed = {
        name: tier.model_copy(update={"max_slowdown": max_slowdown}) if tier.is_interactive else tier
        for name, tier in tiers.tiers.items()
    }
    return tiers.model_copy(update={"tiers": changed})


def _answers(observation: Observation, tiers: TierSet) -> dict[str, RequestRecord]:
    return {r.id: r for r in observation.requests if r.is_done and tiers[r.tier].is_interactive}


def _e2e_s(record: RequestRecord) -> float:
    assert record.ended_s is not None, "only of requests that are done"
    return record.ended_s - record.arrived_s


def _ratio(spreads: Sequence[Spread], choose: Callable[[Spread], float | None]) -> float | None:
    """Return the first of two spreads' quantile ÷ that of the second."""
    above, below = (choose(s) for s in spreads)
    return above / below if above is not None and below else None


def _gain(bulk: Observation, experiment: Experiment) -> float:
    """Return bulk's time alone ÷ the part that its work takes; the rest, steps' fixed cost, it saves beside others."""
    busy_s, steps = sum(e.busy_s for e in bulk.engines), sum(e.steps for e in bulk.engines)
    fixed_s = steps * experiment.card.decode.step_s
    return experiment.duration_s * len(bulk.engines) / max(busy_s - fixed_s, 1e-9)
