"""The traffic offered to a simulated deployment: requests with arrival times, and backlogs that refill themselves.

Made from a scenario by the functions that plan real load (`workload`), or from a trace. The load is raised with more
clients and lowered by thinning the last one; time is never compressed. Knows tiers by name; not clocks, queues or
engines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.simulation.trace import TraceRow
from loadtest.traffic.scenario import Scenario
from loadtest.traffic.scenario_arrivals import ClosedLoop
from loadtest.traffic.workload import PlannedRequest, generator, plan_closed_loop, plan_open_loop
from scheduler.config import Tier, TierSet

FIRST_PREFIX_TOKEN = 16  # above the ids of special tokens
FIRST_OWN_TOKEN = 1 << 24  # tokens below it are the shared prefixes of traces


class TrafficError(Exception):
    """The traffic cannot be offered; the message says what does not fit."""


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """`at_s` counts from the start of the load (0 in a backlog), `deadline_s` from arrival; None: that of the tier."""

    id: str
    traffic_class: str
    tier: str
    at_s: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    seed: int
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """`streams` requests are always in flight; each answer sends the next."""

    traffic_class: str
    streams: int
    requests: Iterator[OfferedRequest]


@dataclass(frozen=True, slots=True)
class Traffic:
    """`arrivals` by time. `classes` maps each class to its tier, in the order of the report."""

    classes: dict[str, str]
    arrivals: Sequence[OfferedRequest]
    backlogs: Sequence[Backlog]
    shares_prefixes: bool


def scenario_traffic(scenario: Scenario, tiers: TierSet, duration_s: float, seed: int, round_: int = 0) -> Traffic:
    """Return the traffic that round `round_` of an experiment with this seed sends."""
    classes = {name: tier_of(c.service_tier, tiers).name for name, c in scenario.classes.items()}
    shares = any(c.prefixes is not None or c.sessions is not None for c in scenario.classes.values())
    prompts = _Prompts(shares)
    arrivals: list[OfferedRequest] = []
    backlogs = []
    for name, traffic in scenario.classes.items():
        if isinstance(traffic.arrivals, ClosedLoop):
            plan = (_offered(classes[name], p, prompts) for p in plan_closed_loop(traffic, seed, round_))
            backlogs.append(Backlog(name, traffic.arrivals.streams, plan))
        else:
            arrivals += [_offered(classes[name], p, prompts) for p in plan_open_loop(traffic, duration_s, seed, round_)]
    arrivals.sort(key=lambda r: r.at_s)
    return Traffic(classes, arrivals, backlogs, shares)


def trace_traffic(rows: Sequence[TraceRow], tiers: TierSet, duration_s: float, seed: int, rate: float = 1.0) -> Traffic:
    """Return the requests of a trace within `duration_s`, from `rate` times as many clients: whole copies, and a
    thinned one.

    Copies are rotated in time against each other, since the same bursts at the same moments would be another load. A
    larger rate keeps every request of a smaller one.
    """
    rows = [row for row in rows if row.arrival_s < duration_s]
    classes: dict[str, str] = {}
    arrivals: list[OfferedRequest] = []
    prefixes = {row.prefix_id: i for i, row in enumerate(rows) if row.prefix_id}
    prompts = _Prompts(bool(prefixes))
    for copy in range(int(rate) + 1):
        rng = generator(seed, "trace", copy)
        shift_s = rng.random() * duration_s * (copy > 0)
        kept = rng.random(len(rows)) < rate - copy
        for i in kept.nonzero()[0].tolist():
            row = rows[i]
            tier = _tier_named(row.tier, tiers).name
            name = row.traffic_class or tier
            if classes.setdefault(name, tier) != tier:
                raise TrafficError(f"the trace's class {name!r} is in two tiers: {classes[name]!r} and {tier!r}")
            at_s = (row.arrival_s + shift_s) % duration_s if copy else row.arrival_s
            prompt = prompts.traced(row, prefixes.get(row.prefix_id, 0), len(arrivals))
            request_id = f"{name}-{copy}-{i}"
            arrivals.append(OfferedRequest(request_id, name, tier, at_s, prompt, row.output_tokens, i, row.deadline_s))
    arrivals.sort(key=lambda r: r.at_s)
    return Traffic(classes, arrivals, (), shares_prefixes=bool(prefixes))


def tier_of(service_tier: str | None, tiers: TierSet) -> Tier:
    return tiers[tiers.default_tier] if service_tier is None else _tier_named(service_tier, tiers)


def _tier_named(name: str, tiers: TierSet) -> Tier:
    """Return the tier of this name, or of this `service_tier`."""
    tier = tiers.tiers.get(name) or tiers.for_service_tier(name)
    if tier is None:
        raise TrafficError(f"no tier and no service_tier is called {name!r} (tiers: {', '.join(tiers.tiers)})")
    return tier


class _Prompts:
    """Makes prompts of the planned lengths.

    Their tokens matter to a prefix cache only. Without one, all prompts of a length are the same object, so that a
    million requests fit into memory.
    """

    def __init__(self, have_meaning: bool) -> None:
        self._have_meaning = have_meaning
        self._of_length: dict[int, tuple[int, ...]] = {}

    def planned(self, planned: PlannedRequest) -> tuple[int, ...]:
        """Return a prompt that repeats each segment's seed: equal where segments are equal, and different elsewhere."""
        if not self._have_meaning:
            return self._any_of(planned.prompt_tokens)
        return tuple(FIRST_OWN_TOKEN + s.seed for s in planned.segments for _ in range(s.tokens))

    def traced(self, row: TraceRow, prefix: int, number: int) -> tuple[int, ...]:
        """Return a prompt that repeats a token of its prefix, then a token of its own."""
        if not self._have_meaning:
            return self._any_of(row.prompt_tokens)
        shared = row.prefix_tokens or 0
        return (FIRST_PREFIX_TOKEN + prefix,) * shared + (FIRST_OWN_TOKEN + number,) * (row.prompt_tokens - shared)

    def _any_of(self, length: int) -> tuple[int, ...]:
        prompt = self._of_length.get(length)
        if prompt is None:
            prompt = self._of_length[length] = (FIRST_OWN_TOKEN,) * length
        return prompt


def _offered(tier: str, planned: PlannedRequest, prompts: _Prompts) -> OfferedRequest:
    name, prompt = planned.traffic_class, prompts.planned(planned)
    request_id = f"{name}-{planned.index}"
    return OfferedRequest(request_id, name, tier, planned.at_s, prompt, planned.output_tokens, planned.prompt_seed)
