"""`python -m bench isolation`: its flags, the servers that it starts, and where its results go.

Knows flags and exit codes; the experiment is `bench.isolation.run`.
"""

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import yaml
from pydantic import AliasChoices, Field

from bench.isolation.admin import Systems, tiers_in_force, tiers_restored
from bench.isolation.arms import OWN_ARMS, Document, read_shipped_tiers, slowdown_of
from bench.isolation.experiments import EXPERIMENTS, ExperimentName
from bench.isolation.results.record import Drawings, isolation_record
from bench.isolation.results.result import Result
from bench.isolation.run import ExperimentConfig, run_experiment
from bench.isolation.servers import ServerFlags, context_of, with_tokenizer, write_served_shape
from loadtest.client.http import Target, TargetError
from loadtest.client.runner import Timing
from loadtest.model_shapes import ShapeError
from loadtest.reporting.record import Provenance
from loadtest.reporting.writers import publish, write_page
from loadtest.running import PLOTS, ends_on_sigterm, print_progress, require, run_to_end
from loadtest.traffic.scenario import Scenario, Targets, load_scenario
from loadtest.traffic.scenario_arrivals import ClosedLoop
from scheduler.config import TierConfigError, load_tiers


class Isolation(ServerFlags):
    """Interactive and bulk traffic on one server under several policies, which take turns.

    Reports goals and tables, and writes a page with plots.
    """

    experiment: ExperimentName = Field("isolation", description="isolation, overload (1.5 ×), deadlines or frontier.")
    arms: str = Field(
        "", description="Arms to run, such as A0,A1,OURS,S1.25 (`max_slowdown` 1.25); empty: the experiment's."
    )
    model: Path | None = Field(None, description="Model directory to serve; unset: --shape.")
    shape: str = Field("135m", description="Shape to serve with random weights; demo: the shipped demo model.")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights for --model.")
    tiers: Path | None = Field(None, description="Tiers file of OURS; unset: the shipped one, or that of --url.")
    scenario: str = Field("", description="A shipped scenario, or a YAML file; empty: the experiment's.")
    bulk_pool: str = Field("", description="A shipped bulk pool in place of the scenario's own bulk.")
    streams: int = Field(0, ge=0, le=900, description="Streams of each bulk backlog; 0: the scenario's.")
    scale: float = Field(
        0.0, ge=0, le=10, description="Factor of all lengths; 0: chosen so that they fit the model's context."
    )
    context: int = Field(0, ge=0, description="The model's context in tokens; 0: from its config, if it is here.")
    clients: float = Field(0.0, ge=0, description="Solo goodput in multiples of the scenario's load; 0: search for it.")
    load: float = Field(
        0.0, ge=0, le=10, description="Share of the solo goodput to offer; 0: the experiment's (isolation: 0.5)."
    )
    ttft_ms: float = Field(0.0, ge=0, description="SLO of the first token, for all arms; 0: that of the tiers.")
    itl_ms: float = Field(0.0, ge=0, description="SLO of the gaps between tokens, for all arms; 0: that of the tiers.")
    duration: float = Field(60.0, gt=0, le=7200, description="Seconds measured of each arm.")
    rounds: int = Field(2, ge=1, le=100, description="Number of parts that each arm's duration is divided into.")
    lead: float = Field(5.0, ge=0, le=120, description="Seconds of bulk before each part is measured.")
    drain: float = Field(
        20.0, ge=0, le=600, description="Seconds that interactive requests may take after the end of a part."
    )
    search_seconds: float = Field(
        12.0,
        gt=0,
        le=600,
        description="Seconds of one try in the search for the solo goodput; tripled if it saw too little.",
    )
    search_budget: float = Field(
        180.0, gt=0, le=7200, description="Seconds after which the search for the solo goodput begins no new try."
    )
    threads: int = Field(
        0, ge=0, description="CPU threads of the servers that are started; 0: the servers' own choice."
    )
    seed: int = Field(1, ge=0, description="The same seed sends the same requests.")
    json_file: Path | None = Field(
        None, validation_alias=AliasChoices("json"), description="Also write the result, request by request."
    )
    report_dir: Path | None = Field(
        None, validation_alias=AliasChoices("report"), description="Also write a page, index.html, into this directory."
    )

    def cli_cmd(self) -> None:
        with ends_on_sigterm():
            run_to_end(self.measure())

    async def measure(self) -> None:
        """Run the experiment and report its result.

        Raises `TargetError`, `ScenarioError` or `MissingExtra` for errors that the user can correct. Exits with 1 if a
        traffic class got no answers.
        """
        if self.report_dir is not None:
            require(PLOTS, "--report")
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-isolation-")))
            model_dir = self._model_dir(folder)
            load_format = self.load_format if self.model is not None else "dummy"
            served = None if model_dir is None else (model_dir, load_format)
            ours = (await self.start_ours(stack, folder, served, self.threads)).target
            peer = await self.start_peer(stack, folder, served, self.threads)
            systems = Systems(ours, None if peer is None else peer.target)
            config = await self._config(ours, model_dir)
            if self.url:
                await stack.enter_async_context(tiers_restored(ours))
            result = await run_experiment(config, systems, print_progress)
        self._conclude(result, ours.model)

    def _model_dir(self, folder: Path) -> Path | None:
        """Return the directory of the model to serve; None for the demo model, and if the server already runs."""
        if self.url or (self.model is None and self.shape == "demo"):
            return self.model
        try:
            if self.model is not None:
                return with_tokenizer(self.model, folder) if self.load_format == "dummy" else self.model
            return write_served_shape(folder / f"shape-{self.shape}", self.shape, self.context or 8192)
        except ShapeError as error:
            raise TargetError(str(error)) from error

    async def _config(self, ours: Target, model_dir: Path | None) -> ExperimentConfig:
        experiment = EXPERIMENTS[self.experiment]
        scenario = self._with_streams(load_scenario(self.scenario or experiment.scenario, self.bulk_pool))
        scale = self.scale or scenario.scale_for(self._context(model_dir))
        return ExperimentConfig(
            experiment,
            scenario.with_lengths_scaled(scale) if scale != 1.0 else scenario,
            scale,
            await self._tiers(ours),
            Targets(ttft_ms=self.ttft_ms or None, itl_ms=self.itl_ms or None),
            Timing(self.duration, self.rounds, self.lead, self.settle, self.drain),
            self.seed,
            clients=self.clients or None,
            load=self.load or None,
            wanted=self._arm_names(),
            search_s=self.search_seconds,
            search_budget_s=self.search_budget,
        )

    def _arm_names(self) -> list[str]:
        names = [name.strip().upper() for name in self.arms.split(",") if name.strip()]
        if unknown := [name for name in names if name not in OWN_ARMS and slowdown_of(name) is None]:
            raise TargetError(f"there is no arm {unknown[0]}: {', '.join(OWN_ARMS)} are known")
        return names

    def _context(self, model_dir: Path | None) -> int | None:
        if self.context or model_dir is None:
            return self.context or None
        try:
            return context_of(model_dir)
        except ShapeError as error:
            raise TargetError(str(error)) from error

    def _with_streams(self, scenario: Scenario) -> Scenario:
        if not self.streams:
            return scenario
        backlog = ClosedLoop(streams=self.streams)
        classes = {
            name: c.model_copy(update={"arrivals": backlog}) if isinstance(c.arrivals, ClosedLoop) else c
            for name, c in scenario.classes.items()
        }
        return scenario.model_copy(update={"classes": classes})

    async def _tiers(self, ours: Target) -> Document:
        if self.tiers is not None:
            try:
                load_tiers(self.tiers)
            except TierConfigError as error:
                raise TargetError(str(error)) from error
            document: Document = yaml.safe_load(self.tiers.read_text(encoding="utf-8"))
            return document
        return await tiers_in_force(ours) if self.url else read_shipped_tiers()

    def _conclude(self, result: Result, model: str) -> None:
        record = isolation_record(result, Provenance.of_this_run(model, self.seed), self._drawings(result))
        publish(record, self.json_file)
        if self.report_dir is not None:
            print(f"\nwritten: {write_page(self.report_dir, record)}")
        if not result.has_answers:
            raise SystemExit(1)

    def _drawings(self, result: Result) -> Drawings:
        if self.report_dir is None:
            return {}
        from bench.isolation.results.plots import draw_experiment  # imports matplotlib

        return draw_experiment(result)
