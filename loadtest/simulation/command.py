"""The command `simulate`: turns flags into an experiment, and prints its result as text and JSON.

Knows flags and exit codes; `experiment` and `capacity` do the work.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import structlog
from pydantic import AliasChoices, BaseModel, Field

from loadtest.progress import progress
from loadtest.reporting.record import Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import one_sentence, print_progress
from loadtest.simulation.capacity import Capacity, Probe, fewest_workers, highest_rate
from loadtest.simulation.cost_card import CostCardError, load_cost_card
from loadtest.simulation.deployment import Scaling
from loadtest.simulation.experiment import NEIGHBOUR_S, Experiment, find_tiers, read_whole_trace
from loadtest.simulation.frontier import find_frontier
from loadtest.simulation.observation import Observation
from loadtest.simulation.report import frontier_record, simulation_record
from loadtest.simulation.run import DRAIN_S
from loadtest.simulation.summary import Summary
from loadtest.simulation.traffic import TraceError, TrafficError
from loadtest.traffic.scenario import ScenarioError
from scheduler.config import TierConfigError

AUTO = "auto"


class Simulate(BaseModel):
    """Run the shipped scheduler in virtual time on modeled engines.

    Prints the latencies of a load, or searches for the number of engines that the load needs.
    """

    scenario: str = Field("chat-and-bulk", description="A shipped scenario, or a YAML file.")
    bulk_pool: str = Field("", description="A shipped bulk pool in place of the scenario's own bulk.")
    trace: Path | None = Field(None, description="JSONL or CSV of requests, in place of a scenario.")
    tiers: str = Field("", description="The tiers file; unset: the shipped tiers.yaml.")
    model_shape: str = Field("135m-cpu", description="A shipped cost card, or one that `loadtest calibrate` wrote.")
    duration: float = Field(120.0, gt=0, le=7 * 86400, description="Virtual seconds of load.")
    workers: str = Field(
        "1",
        pattern=r"^([1-9][0-9]{0,3}(-[1-9][0-9]{0,3})?|auto)$",
        description="Number of engines; auto: the fewest that keep all SLOs; 1-10: as many of them as GET /admin/scale "
        "wants.",
    )
    worker_start: float = Field(
        30.0, ge=1, le=3600, description="Seconds until a new engine serves, where their number changes."
    )
    rate: float = Field(
        1.0, gt=0, le=1000, description="Factor of the number of clients; each client stays as fast as it is."
    )
    find_capacity: Literal["", "workers", "rate"] = Field(
        "", description="Search for the fewest workers, or the highest rate, that keep all SLOs."
    )
    max_slowdown: str = Field(
        "",
        pattern=r"^$|^[0-9]+(\.[0-9]+)?(,[0-9]+(\.[0-9]+)?)*$",
        description="Values of the tiers' max_slowdown, such as 1.05,1.25,2: what bulk gets at each, beside its limit.",
    )
    drain: float = Field(DRAIN_S, ge=0, le=86400, description="Seconds that requests have to end after the load.")
    gather_ms: float = Field(
        0.0, ge=0, le=1000, description="Requests that arrive within this many milliseconds enter the queue together."
    )
    service_tier: str = Field("", description="`service_tier` of all interactive classes; empty: the scenario's own.")
    drift: float = Field(1.0, gt=0, le=10, description="Step times are multiplied by this in the second half.")
    neighbour: float = Field(
        1.0, ge=1, le=10, description=f"Each step of {NEIGHBOUR_S:g} s in the middle is up to this many times longer."
    )
    seed: int = Field(1, ge=0, description="The same seed gives the same report, to the byte.")
    json_file: Path | None = Field(
        None, validation_alias=AliasChoices("json"), description="Also write everything to this file."
    )

    def cli_cmd(self) -> None:
        log_errors_only()
        with one_sentence(CostCardError, ScenarioError, TierConfigError, TraceError, TrafficError, said_by="simulate"):
            kept = self._answer(self._experiment())
        if not kept:
            raise SystemExit(1)

    def _experiment(self) -> Experiment:
        fewest, _, most = self.workers.partition("-")
        return Experiment(
            tiers=find_tiers(self.tiers),
            card=load_cost_card(self.model_shape),
            duration_s=self.duration,
            scenario=self.scenario,
            bulk_pool=self.bulk_pool,
            trace=read_whole_trace(self.trace) if self.trace is not None else (),
            workers=1 if self.workers == AUTO else int(fewest),
            scaling=Scaling(int(most), self.worker_start) if most else None,
            rate=self.rate,
            seed=self.seed,
            drain_s=self.drain,
            gather_s=self.gather_ms / 1000,
            drift=self.drift,
            service_tier=self.service_tier,
            neighbour=self.neighbour,
        )

    def _answer(self, experiment: Experiment) -> bool:
        """Run the experiment or the search, and print the result.

        Return False if a search found no amount that keeps all SLOs.
        """
        if self.max_slowdown:
            self._compare(experiment)
            return True
        if self.find_capacity == "rate":
            found = highest_rate(lambda rate: _progress("rate", rate, experiment.with_rate(rate)))
            return self._conclude(experiment.with_rate, found, _probes("rate", found))
        if self.find_capacity == "workers" or self.workers == AUTO:
            fewest = fewest_workers(lambda n: _progress("workers", n, experiment.with_workers(n)))
            return self._conclude(experiment.with_workers, fewest, _probes("workers", fewest))
        self._report(experiment)
        return True

    def _compare(self, experiment: Experiment) -> None:
        """Print what bulk gets at each value of `max_slowdown`."""

        def run(what: str, changed: Experiment) -> Observation:
            with progress(f"simulating {what}", changed.duration_s) as show:
                return changed.run(show)[1]

        values = [float(value) for value in self.max_slowdown.split(",")]
        if self.trace or self.find_capacity or self.workers == AUTO or experiment.scaling or min(values) < 1:
            raise TrafficError("--max-slowdown takes values from 1, and needs a --scenario and a number of --workers")
        frontier = find_frontier(experiment, values, run)
        options = self.model_dump(mode="json", exclude={"json_file"})
        publish(frontier_record(self._title(experiment), frontier, options), self.json_file)

    def _conclude(self, at: Callable[[Any], Experiment], found: Capacity[Any], probes: Section) -> bool:
        if found.best is None:
            publish(Record("no amount within bounds keeps every SLO", [probes]))
            return False
        self._report(at(found.best.amount), probes)
        return True

    def _report(self, experiment: Experiment, *before: Section) -> None:
        with progress(f"simulating {experiment.duration_s:g} s", experiment.duration_s) as show:
            summary, observation = experiment.run(show)
        options = self.model_dump(mode="json", exclude={"json_file"})
        record = simulation_record(self._title(experiment), summary, experiment.card, observation, options)
        publish(replace(record, sections=[*before, *record.sections]), self.json_file)

    def _title(self, experiment: Experiment) -> str:
        load = str(self.trace) if self.trace is not None else self.scenario
        rate = f", {experiment.rate:.3g} times the clients" if experiment.rate != 1 else ""
        most = f" to {experiment.scaling.most}" if experiment.scaling is not None else ""
        engines = f"{experiment.workers}{most} x {experiment.card.name}"
        return f"{experiment.duration_s:g} s of {load}{rate} on {engines}, seed {experiment.seed}"


def log_errors_only() -> None:
    """Log errors only. The controller's decisions need no log, since the report counts every moved knob."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def _progress(what: str, amount: float, experiment: Experiment) -> Summary:
    with progress(f"simulating {what} {amount:.4g}", experiment.duration_s) as show:
        summary, _ = experiment.run(show)
    verdict = "all SLOs kept" if summary.keeps_slos else "not all SLOs kept"
    print_progress(f"{what} {amount:.4g}: {verdict}")
    return summary


def _probes(what: str, found: Capacity[Any]) -> Section:
    header = (what, "busy", "SLOs", "missed")
    rows = [_probe_cells(probe) for probe in sorted(found.probes, key=lambda p: p.amount)]
    return Section(table=Table.of(header, rows))


def _probe_cells(probe: Probe[Any]) -> tuple[str, ...]:
    broken = [f"{p.tier} {p.what}" for p in probe.summary.slos if not p.is_kept]
    busy = f"{100 * probe.summary.engines.busy_share:.1f} %"
    return (f"{probe.amount:.4g}", busy, "kept" if not broken else "missed", ", ".join(broken) or "–")
