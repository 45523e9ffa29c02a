"""`python -m bench simulator-accuracy`: simulates one arm of an isolation result and compares it with the measurement.

The simulation uses a cost card. It sends the same requests at the same times to the same tiers, and each request
generates the number of tokens that was measured. A bulk backlog has no fixed times: in the simulation too, each answer
starts the next request. Two latencies of the interactive classes are compared: TTFT, and each request's mean gap
between tokens. Knows the result's JSON; measures nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import CliPositionalArg

from loadtest.reporting.formats import milliseconds, number
from loadtest.reporting.record import Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import one_sentence
from loadtest.simulation.command import log_errors_only
from loadtest.simulation.cost_card import CostCard, CostCardError, load_cost_card
from loadtest.simulation.deployment import Setting
from loadtest.simulation.observation import RequestRecord
from loadtest.simulation.run import simulate
from loadtest.simulation.summary import Spread, spread
from loadtest.simulation.traffic import OfferedRequest, Traffic, TrafficError, scenario_traffic
from loadtest.traffic.scenario import Scenario
from scheduler.config import TierConfigError, parse_tiers


class ComparisonError(Exception):
    """Raised if the result cannot be simulated; the message says why."""


class SimulatorAccuracy(BaseModel):
    """A comparison of the simulator with a measured run.

    One arm of an isolation result is simulated on a cost card.
    """

    result: CliPositionalArg[Path] = Field(description="The JSON file of `python -m bench isolation`.")
    arm: str = Field("OURS", description="The arm of that result to simulate.")
    model_shape: str = Field("135m-cpu", description="A shipped cost card, or one that `loadtest calibrate` wrote.")
    gateway_ms: float = Field(0.0, ge=0, description="Milliseconds that HTTP and the gateway add to a first token.")
    within: float = Field(
        0.0, ge=0, description="Exit with 1 if a ratio is further than this from 1; 0: only show the ratios."
    )

    def cli_cmd(self) -> None:
        log_errors_only()
        with one_sentence(ComparisonError, CostCardError, TierConfigError, TrafficError, said_by="simulator-accuracy"):
            card = load_cost_card(self.model_shape)
            compared = compare_arm(read_result(self.result), self.arm, card, self.gateway_ms / 1000)
        publish(accuracy_record(self.arm, card, compared))
        ratios = [ratio for c in compared for ratio in c.ratios() if ratio is not None]
        if self.within and not (ratios and all(abs(ratio - 1) <= self.within for ratio in ratios)):
            raise SystemExit(1)


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class MeasuredGaps(_Part):
    mean: float


class MeasuredRequest(_Part):
    """One request in the JSON file of `bench isolation`."""

    arm: str
    round_: int = Field(alias="round")
    traffic_class: str = Field(alias="class")
    index: int
    output_tokens: int
    ttft_s: float | None
    gaps_s: MeasuredGaps | None
    error: str | None

    @property
    def id(self) -> str:
        return f"{self.traffic_class}-{self.index}"


class MeasuredTiming(_Part):
    duration_s: float = Field(gt=0)
    rounds: int = Field(ge=1)
    lead_s: float = Field(ge=0)
    drain_s: float = Field(ge=0)


class MeasuredArm(_Part):
    tiers: dict[str, Any] | None
    classes: dict[str, Any]


class MeasuredResult(_Part):
    """The parts of an isolation result that are needed to simulate it."""

    seed: int
    scenario: Scenario
    timing: MeasuredTiming
    arms: dict[str, MeasuredArm]
    requests: list[MeasuredRequest]


@dataclass(frozen=True, slots=True)
class Compared:
    """One latency of one class, measured and simulated."""

    traffic_class: str
    what: str  # "TTFT" | "mean gap"
    measured: Spread
    simulated: Spread

    def ratios(self) -> tuple[float | None, float | None]:
        """Return the ratios simulated ÷ measured of the p50 and of the p95. A ratio is None if a value is missing."""
        pairs = ((self.simulated.p50, self.measured.p50), (self.simulated.p95, self.measured.p95))
        p50, p95 = (None if not real or simulated is None else simulated / real for simulated, real in pairs)
        return p50, p95


def read_result(path: Path) -> MeasuredResult:
    """Return the result in a JSON file of `bench isolation`. Raises `ComparisonError` if it cannot be read."""
    try:
        return MeasuredResult.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ComparisonError(f"{path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ComparisonError(f"{path}: not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ComparisonError(f"{path}: not a result of `bench isolation`: {where}: {first['msg']}") from error


def compare_arm(result: MeasuredResult, arm: str, card: CostCard, gateway_s: float = 0.0) -> list[Compared]:
    """Simulate every round of an arm and return its latencies, measured and simulated.

    `gateway_s` is the time that HTTP and the gateway add to the TTFT; the cost card does not include it. Raises
    `ComparisonError` if the result has no such arm, or does not have the arm's tiers.
    """
    if arm not in result.arms or result.arms[arm].tiers is None:
        known = ", ".join(name for name, found in result.arms.items() if found.tiers is not None)
        raise ComparisonError(f"the result has no arm {arm!r} whose tiers are known (it has {known})")
    measured = [r for r in result.requests if r.arm == arm]
    simulated = [r for round_ in range(result.timing.rounds) for r in _simulated(result, arm, round_, card)]
    compared: list[Compared] = []
    for name in result.arms[arm].classes:
        if result.scenario.classes[name].role != "interactive":
            continue
        real = [r for r in measured if r.traffic_class == name and r.error is None]
        like = [r for r in simulated if r.traffic_class == name and r.is_done]
        compared += _compare(name, real, like, gateway_s)
    return compared


def _compare(
    name: str, real: Sequence[MeasuredRequest], like: Sequence[RequestRecord], gateway_s: float
) -> Iterator[Compared]:
    yield Compared(
        name,
        "TTFT",
        spread(r.ttft_s for r in real if r.ttft_s is not None),
        spread(r.ttft_s + gateway_s for r in like if r.ttft_s is not None),
    )
    yield Compared(
        name,
        "mean gap",
        spread(r.gaps_s.mean for r in real if r.gaps_s is not None),
        spread(r.gap_s for r in like if r.gap_s is not None),
    )


def _simulated(result: MeasuredResult, arm: str, round_: int, card: CostCard) -> list[RequestRecord]:
    tiers = parse_tiers(result.arms[arm].tiers, f"the tiers of arm {arm}")
    timing, scenario = result.timing, _scenario_of_arm(result, arm)
    part_s = timing.duration_s / timing.rounds
    traffic = scenario_traffic(scenario, tiers, part_s, result.seed, round_)
    ended = {
        r.id: r.output_tokens
        for r in result.requests
        if r.arm == arm and r.round_ == round_ and r.error is None and r.output_tokens
    }
    lead_s = timing.lead_s if traffic.loops else 0.0
    setting = Setting(tiers, card, seed=round_, prefix_cache=traffic.shares_prefixes, lead_s=lead_s)
    return simulate(setting, _with_measured_lengths(traffic, ended), part_s, drain_s=timing.drain_s).requests


def _scenario_of_arm(result: MeasuredResult, arm: str) -> Scenario:
    """Return the scenario with only the classes whose requests the arm sent."""
    classes = {n: c for n, c in result.scenario.classes.items() if n in result.arms[arm].classes}
    return result.scenario.model_copy(update={"classes": classes})


def _with_measured_lengths(traffic: Traffic, ended: Mapping[str, int]) -> Traffic:
    """Return the traffic in which each answer has its measured length, if that is known."""

    def cut(offered: OfferedRequest) -> OfferedRequest:
        return replace(offered, output_tokens=ended.get(offered.id, offered.output_tokens))

    loops = [replace(loop, requests=map(cut, loop.requests)) for loop in traffic.loops]
    return replace(traffic, arrivals=[cut(r) for r in traffic.arrivals], loops=loops)


def accuracy_record(arm: str, card: CostCard, compared: Sequence[Compared]) -> Record:
    header = ("class", "what", "n", "simulated n", "p50 ms", "simulated", "÷", "p95 ms", "simulated", "÷")
    ratios = [ratio for c in compared for ratio in c.ratios() if ratio is not None]
    worst = max((abs(ratio - 1) for ratio in ratios), default=None)
    verdict = "nothing to compare" if worst is None else f"largest deviation: {100 * worst:.1f} %"
    table = Table.of(header, map(_compared_cells, compared))
    return Record(sections=[Section(f"arm {arm} on the card {card.name}", table, (verdict,))])


def _compared_cells(c: Compared) -> tuple[str, ...]:
    p50, p95 = c.ratios()
    return (
        *(c.traffic_class, c.what, str(c.measured.count), str(c.simulated.count)),
        *(milliseconds(c.measured.p50), milliseconds(c.simulated.p50), number(p50)),
        *(milliseconds(c.measured.p95), milliseconds(c.simulated.p95), number(p95)),
    )
