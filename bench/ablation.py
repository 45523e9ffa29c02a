"""`python -m bench ablation`: simulates loads with the whole controller, and with each of its parts switched off.

A variant is a change of one key of the tiers file, such as `controller.feedback=false`, or another tiers file. Knows
variants and tables; the simulator does the rest.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import AliasChoices, BaseModel, Field

from bench.isolation.arms import read_arm_file
from loadtest.progress import progress
from loadtest.reporting.formats import milliseconds, number, percent
from loadtest.reporting.record import Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import one_sentence, print_progress
from loadtest.simulation.command import log_errors_only
from loadtest.simulation.cost_card import CostCardError, load_cost_card
from loadtest.simulation.experiment import Experiment, find_tiers
from loadtest.simulation.observation import RequestRecord
from loadtest.simulation.summary import spread
from loadtest.simulation.traffic import TrafficError, tier_of
from loadtest.traffic.scenario import Scenario, ScenarioError, load_scenario
from scheduler.config import TierConfigError, TierSet, parse_tiers

LOADS = (
    *("w1-chat=2", "w2-code=0.5", "w3-square=1", "w4-agents=2"),
    *("saturation=0.25", "saturation=1", "saturation=2", "saturation=4"),
)
WHOLE = "whole controller"
ARMS = ("a2-first-come", "a3-strict-priority")


class Ablation(BaseModel):
    """Simulate loads with the whole controller and without parts of it. Prints a table for each load.

    Latencies are divided by those of the interactive classes alone; for a load without bulk, by those with the whole
    controller.
    """

    loads: list[str] = Field(list(LOADS), description="SCENARIO=RATE, as for `simulate`; may be repeated.")
    tiers: str = Field("", description="The tiers file of the whole controller; unset: the shipped tiers.yaml.")
    variants: list[str] = Field(
        [],
        description="KEY=VALUE of the tiers file, a tiers file, or an arm of `isolation`; may be repeated. Unset: each "
        "switch of the controller off, first come first served, and strict priority.",
    )
    bulk_pool: str = Field("", description="A shipped bulk pool in place of the bulk of scenarios that have some.")
    model_shape: str = Field("135m-cpu", description="A shipped cost card, or one that `loadtest calibrate` wrote.")
    context: int = Field(1024, ge=16, description="Context of the model; lengths are scaled to fit into it.")
    duration: float = Field(120.0, gt=0, le=86400, description="Virtual seconds of each load.")
    seed: int = Field(1, ge=0, description="The same seed gives the same tables.")
    json_file: Path | None = Field(
        None, validation_alias=AliasChoices("json"), description="Also write the tables' values to this file."
    )

    def cli_cmd(self) -> None:
        log_errors_only()
        with one_sentence(CostCardError, ScenarioError, TierConfigError, TrafficError, said_by="ablation"):
            base = find_tiers(self.tiers)
            variants = {WHOLE: base}
            variants |= {name: variant_of(base, name) for name in self.variants or usual_variants(base)}
            with progress("loads", len(self.loads)) as show:
                rows = {}
                for number, load in enumerate(self.loads):
                    rows[load] = self._measure(load, variants)
                    show(number + 1)
        publish(ablation_record(rows), self.json_file)

    def _measure(self, load: str, variants: dict[str, TierSet]) -> list["Row"]:
        scenario, rate = parse_load(load)
        has_bulk = bool(load_scenario(scenario, needed=()).with_role("bulk"))
        card = load_cost_card(self.model_shape)
        experiment = Experiment(
            variants[WHOLE],
            card.model_copy(update={"max_model_len": min(self.context, card.max_model_len)}),
            self.duration,
            scenario,
            bulk_pool=self.bulk_pool if has_bulk else "",
            rate=rate,
            seed=self.seed,
        )
        alone = measure(replace(experiment, interactive_only=True), WHOLE, variants[WHOLE]) if has_bulk else None
        rows: list[Row] = []
        for name, tiers in variants.items():
            print_progress(f"{load}: {name}")
            rows.append(measure(replace(experiment, tiers=tiers), name, variants[WHOLE]))
        return [row.divided_by(alone or rows[0]) for row in rows]


@dataclass(frozen=True, slots=True)
class Row:
    """The interactive requests of one load under one variant, and what bulk got beside them.

    First tokens and E2E times are in seconds, and after `divided_by` ratios. `in_time` is the share of the offered
    requests whose first token kept the SLO of the whole controller.
    """

    variant: str
    in_time: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    e2e_p50: float | None
    itl_p99_s: float | None
    interactive_per_s: float  # tokens
    bulk_per_s: float  # tokens
    wasted_share: float

    def divided_by(self, other: "Row") -> "Row":
        """Return the row with its first tokens and E2E times divided by those of `other`."""
        return replace(
            self,
            ttft_p50=_ratio(self.ttft_p50, other.ttft_p50),
            ttft_p99=_ratio(self.ttft_p99, other.ttft_p99),
            e2e_p50=_ratio(self.e2e_p50, other.e2e_p50),
        )


def _ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or not to else value / to


def parse_load(load: str) -> tuple[str, float]:
    """Return the scenario and the rate of `SCENARIO=RATE`; the rate may be left out. Raises `ScenarioError`."""
    scenario, _, rate = load.partition("=")
    try:
        return scenario, float(rate or 1.0)
    except ValueError as error:
        raise ScenarioError(f"{load}: the rate is not a number") from error


def usual_variants(base: TierSet) -> list[str]:
    """Return the variants that switch one part of the controller off each, and the arms without a controller."""
    switches = base.controller.model_dump()
    return [*(f"controller.{key}=false" for key, is_on in switches.items() if is_on is True), *ARMS]


def variant_of(base: TierSet, name: str) -> TierSet:
    """Return the tiers of a variant. Raises `TierConfigError`."""
    key, is_change, value = name.partition("=")
    if is_change:
        return parse_tiers(with_key(base.document(defaults=False), key.split("."), yaml.safe_load(value)), name)
    if (files("bench") / "isolation" / "arms" / f"{name}.yaml").is_file():
        return parse_tiers(read_arm_file(name), name)
    return find_tiers(name)


def with_key(document: dict[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """Return the document with `value` at the end of the path of keys."""
    key, *rest = path
    return {**document, key: with_key(document.get(key) or {}, rest, value) if rest else value}


def measure(experiment: Experiment, variant: str, slo: TierSet) -> Row:
    """Run the experiment. First tokens are in time if they keep the TTFT of their tier in `slo`."""
    summary, observation = experiment.run()
    scenario = load_scenario(experiment.scenario, experiment.bulk_pool, needed=())
    interactive = {c.name for c in scenario.with_role("interactive")}
    requests = [r for r in observation.requests if r.traffic_class in interactive]
    judged = [met for met in (_is_in_time(r, scenario, slo) for r in requests) if met is not None]
    ttft = spread(r.ttft_s for r in requests if r.ttft_s is not None)
    tokens = {c.name: c.tokens_per_s for c in summary.classes}
    interactive_per_s = sum(tokens[name] for name in interactive)
    return Row(
        variant,
        in_time=sum(judged) / len(judged) if judged else None,
        ttft_p50=ttft.p50,
        ttft_p99=ttft.p99,
        e2e_p50=spread(r.ended_s - r.arrived_s for r in requests if r.is_done and r.ended_s is not None).p50,
        itl_p99_s=spread(gap for name in interactive for gap in observation.gaps_s[name]).p99,
        interactive_per_s=interactive_per_s,
        bulk_per_s=sum(tokens.values()) - interactive_per_s,
        wasted_share=summary.engines.wasted_share,
    )


def _is_in_time(record: RequestRecord, scenario: Scenario, slo: TierSet) -> bool | None:
    """Return whether the first token kept the TTFT of the tier that the class asks for; None if it has no TTFT."""
    target_ms = tier_of(scenario.classes[record.traffic_class].service_tier, slo).slo.ttft_p99_ms
    return None if target_ms is None else record.ttft_s is not None and 1000 * record.ttft_s <= target_ms


def ablation_record(rows: dict[str, list[Row]]) -> Record:
    header = ("variant", "in time", "TTFT p50 ÷", "p99 ÷", "E2E p50 ÷", "ITL p99 ms", "tok/s", "bulk tok/s", "wasted")
    sections = [Section(load, Table.of(header, map(_cells, found))) for load, found in rows.items()]
    data = {load: [asdict(row) for row in found] for load, found in rows.items()}
    return Record("÷ alone, or ÷ the whole controller if there is no bulk", sections, data)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.variant,
        percent(row.in_time),
        *(number(ratio) for ratio in (row.ttft_p50, row.ttft_p99, row.e2e_p50)),
        milliseconds(row.itl_p99_s),
        *(f"{rate:.1f}" for rate in (row.interactive_per_s, row.bulk_per_s)),
        percent(row.wasted_share),
    )
