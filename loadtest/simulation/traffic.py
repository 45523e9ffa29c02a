"""The traffic of a simulated run: requests with arrival times, and closed loops, which send a request after an answer.

The traffic is made from a scenario, by the functions that also plan real load (see `workload`), or from a trace. A
higher load has more clients, and a lower load has fewer clients or sends only a part of their requests; time is never
compressed. Knows tiers by name; does not know clocks, queues or engines.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from loadtest.traffic.scenario import Scenario, TrafficClass
from loadtest.traffic.scenario_arrivals import ClosedLoop
from loadtest.traffic.workload import PlannedRequest, generator, plan_closed_loop, plan_open_loop
from scheduler.config import Tier, TierSet


class TraceError(Exception):
    """The trace cannot be used. The message names the file, the line and the key."""


def _none_where_empty(value: Any) -> Any:
    """Return None for an empty cell of a CSV file, and any other value unchanged."""
    return None if value == "" else value


class TraceRow(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    arrival_s: float = Field(ge=0, allow_inf_nan=False)
    tier: str
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    traffic_class: str = Field(default="", alias="class")
    prefix_id: str = ""
    prefix_tokens: Annotated[int | None, BeforeValidator(_none_where_empty)] = Field(default=None, ge=1)
    deadline_s: Annotated[float | None, BeforeValidator(_none_where_empty)] = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _prefix_is_whole(self) -> Self:
        if bool(self.prefix_id) != (self.prefix_tokens is not None):
            raise ValueError("prefix_id and prefix_tokens go together")
        if self.prefix_tokens is not None and self.prefix_tokens > self.prompt_tokens:
            raise ValueError("prefix_tokens: a prefix is a part of the prompt")
        return self


def read_trace(path: Path) -> list[TraceRow]:
    """Return all rows in order of arrival. Raises `TraceError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = _csv_lines(file) if path.suffix.lower() == ".csv" else _jsonl_lines(file)
            rows = [_row(path, number, data) for number, data in lines]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8") from error
    if not rows:
        raise TraceError(f"{path}: holds no request")
    return sorted(rows, key=lambda row: row.arrival_s)


def _csv_lines(file: Iterator[str]) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(file)
    for data in reader:
        yield reader.line_num, data


def _jsonl_lines(file: Iterator[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, line


def _row(path: Path, number: int, data: Any) -> TraceRow:
    try:
        return TraceRow.model_validate(json.loads(data) if isinstance(data, str) else data)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{number}: not JSON: {error.msg}") from error
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise TraceError(f"{path}:{number}: " + "; ".join(wrong)) from error


FIRST_PREFIX_TOKEN = 16  # above the ids of special tokens
FIRST_OWN_TOKEN = 1 << 24  # smaller ids are those of the shared prefixes of traces


class TrafficError(Exception):
    """The traffic cannot be sent. The message says why it does not fit the tiers."""


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """One request of the simulated traffic.

    `at_s` counts from the start of the load and is 0 in a closed loop. `deadline_s` counts from arrival; None means the
    deadline of the tier.
    """

    id: str
    traffic_class: str
    tier: str
    at_s: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    seed: int
    deadline_s: float | None = None
    owner: str = ""  # name of the API key that sends it
    weight: int = 1  # of that key


@dataclass(frozen=True, slots=True)
class RequestLoop:
    """A closed loop: `streams` requests are always in flight, and each answer starts the next request.

    A backlog of bulk goes on until the last other request has been answered. If `ends_with_load`, the loop sends
    nothing after the load, and its last requests may finish.
    """

    traffic_class: str
    streams: int
    requests: Iterator[OfferedRequest]
    ends_with_load: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """All traffic of a run.

    `arrivals` are in order of time. `classes` maps each class to its tier, in the order of the report.
    """

    classes: dict[str, str]
    arrivals: Sequence[OfferedRequest]
    loops: Sequence[RequestLoop]
    shares_prefixes: bool


def scenario_traffic(scenario: Scenario, tiers: TierSet, duration_s: float, seed: int, round_: int = 0) -> Traffic:
    """Return the traffic that an experiment with this seed sends in round `round_`."""
    classes = {name: tier_of(c.service_tier, tiers).name for name, c in scenario.classes.items()}
    shares = any(c.prefixes is not None or c.sessions is not None for c in scenario.classes.values())
    prompts = _Prompts(shares)
    arrivals: list[OfferedRequest] = []
    loops = []
    for name, traffic in scenario.classes.items():
        if isinstance(traffic.arrivals, ClosedLoop):
            plan = _offered(classes[name], traffic, plan_closed_loop(traffic, seed, round_), prompts)
            loops.append(RequestLoop(name, traffic.arrivals.streams, plan, traffic.role == "interactive"))
        else:
            planned = plan_open_loop(traffic, duration_s, seed, round_)
            arrivals += _offered(classes[name], traffic, planned, prompts)
    arrivals.sort(key=lambda r: r.at_s)
    return Traffic(classes, arrivals, loops, shares)


def trace_traffic(rows: Sequence[TraceRow], tiers: TierSet, duration_s: float, seed: int, rate: float = 1.0) -> Traffic:
    """Return the requests that a trace sends within `duration_s`, with the load multiplied by `rate`.

    The load is multiplied by copies of the trace. For example, `rate` 2.3 is two whole copies and a random 30 % of the
    requests of a third copy. Each copy after the first is rotated in time by a random amount, since the same bursts at
    the same moments would be a different kind of load. A larger rate keeps every request of a smaller rate.
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
    """Return the tier for the request field `service_tier`; None means the default tier. Raises `TrafficError`."""
    return tiers[tiers.default_tier] if service_tier is None else _tier_named(service_tier, tiers)


def _tier_named(name: str, tiers: TierSet) -> Tier:
    """Return the tier with this name or with this `service_tier`. Raises `TrafficError`."""
    tier = tiers.tiers.get(name) or tiers.for_service_tier(name)
    if tier is None:
        raise TrafficError(f"no tier and no service_tier is called {name!r} (tiers: {', '.join(tiers.tiers)})")
    return tier


class _Prompts:
    """Makes prompts of the planned lengths.

    The tokens of a prompt matter only to a prefix cache. If `have_meaning` is False, all prompts of the same length are
    one shared object, so that a million requests fit into memory.
    """

    def __init__(self, have_meaning: bool) -> None:
        self._have_meaning = have_meaning
        self._of_length: dict[int, tuple[int, ...]] = {}

    def planned(self, planned: PlannedRequest) -> tuple[int, ...]:
        """Return the prompt of a planned request.

        Each segment becomes one repeated token, which is made from the seed of the segment. So two prompts have equal
        tokens only where they have equal segments.
        """
        if not self._have_meaning:
            return self._any_of(planned.prompt_tokens)
        return tuple(FIRST_OWN_TOKEN + s.seed for s in planned.segments for _ in range(s.tokens))

    def traced(self, row: TraceRow, prefix: int, number: int) -> tuple[int, ...]:
        """Return the prompt of a trace row: one repeated token for the prefix, then another one for the rest.

        Rows with the same `prefix` share the first token. `number` is different for each request.
        """
        if not self._have_meaning:
            return self._any_of(row.prompt_tokens)
        shared = row.prefix_tokens or 0
        return (FIRST_PREFIX_TOKEN + prefix,) * shared + (FIRST_OWN_TOKEN + number,) * (row.prompt_tokens - shared)

    def _any_of(self, length: int) -> tuple[int, ...]:
        prompt = self._of_length.get(length)
        if prompt is None:
            prompt = self._of_length[length] = (FIRST_OWN_TOKEN,) * length
        return prompt


def _offered(
    tier: str, sender: TrafficClass, plan: Iterable[PlannedRequest], prompts: _Prompts
) -> Iterator[OfferedRequest]:
    for p in plan:
        name, prompt = p.traffic_class, prompts.planned(p)
        what = (f"{name}-{p.index}", name, tier, p.at_s, prompt, p.output_tokens, p.prompt_seed, sender.deadline_s)
        yield OfferedRequest(*what, owner=sender.key, weight=sender.key_weight)
