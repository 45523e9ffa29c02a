"""`tidegate loadtest run`: its flags, the load that they describe, and where the results go."""

import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from rich.console import Console

from loadtest.client.http import Target
from loadtest.client.runner import MAX_IN_FLIGHT, Timing
from loadtest.commands import ServerCommand
from loadtest.measure.figures import Figures, figures_of
from loadtest.measure.live import LiveView
from loadtest.measure.preflight import checked
from loadtest.measure.report import load_record, tokens_ratio
from loadtest.measure.rounds import Comparison, Measurement, arms_of, measure
from loadtest.reporting.record import Drawing
from loadtest.reporting.writers import publish, write_page_file
from loadtest.running import PLOTS, ends_on_sigterm, one_sentence, print_progress, require, run_to_end
from loadtest.serving import serving, tidegate_command, tidegate_environment
from loadtest.traffic.scenario import Lengths, TrafficClass, load_scenario
from loadtest.traffic.scenario_arrivals import ClosedLoop, OpenLoop

TIERS_BULK_USERS = 16  # bulk users of `--compare tiers`, which needs bulk traffic
COMPARED_ROUNDS = 2  # parts of each arm, if arms are compared
INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell


class Run(ServerCommand):
    """Send chats or completions to any OpenAI-compatible server, as users that wait for their answers or at a rate.

    Prints requests and tokens a second, TTFT, ITL and E2E, and writes them as JSON and as a page with plots. With
    `--compare`, two arms take turns: all requests with and without their `service_tier`, or all users at once and one
    at a time.
    """

    serve: bool = Field(False, description="Start the demo model for this run, in place of --url, and end it after it.")
    compare: Comparison | None = Field(
        None, description="tiers: with and without; batching: all at once, one at a time."
    )
    users: int = Field(50, ge=0, le=MAX_IN_FLIGHT, description="Users who send their next request after an answer.")
    rate: float = Field(0.0, ge=0, le=10_000, description="Requests a second that wait for no answer, not users.")
    bulk_users: int | None = Field(
        None,
        ge=0,
        le=MAX_IN_FLIGHT,
        description=f"Further users, of the bulk class; 0, or {TIERS_BULK_USERS} for tiers.",
    )
    service_tier: str = Field("", description="`service_tier` of the interactive class; empty: without the field.")
    bulk_service_tier: str = Field("flex", description="`service_tier` of the bulk class.")
    prompt_tokens: int = Field(64, ge=1, le=1_000_000, description="Length of each prompt; of a chat, in words.")
    output_tokens: int = Field(64, ge=1, le=1_000_000, description="Tokens of each answer.")
    endpoint: Literal["chat", "completions"] = Field("chat", description="chat or completions.")
    stream: bool = Field(True, description="Measure whole answers, not streams.")
    scenario: str = Field("", description="A shipped scenario, or a YAML file, in place of users, rate and lengths.")
    duration: float = Field(30.0, gt=0, le=86_400, description="Seconds measured of each arm.")
    rounds: int | None = Field(None, ge=1, le=100, description="Parts of each arm; 2 if arms are compared, else 1.")
    warm_up: float = Field(2.0, ge=0, le=600, description="Seconds of users before each part is measured.")
    drain: float = Field(20.0, ge=0, le=600, description="Seconds for the last answers after each part.")
    at_least: float = Field(0.0, ge=0, description="Exit with 1 if the ratio of tokens a second is smaller than this.")
    html: Path | None = Field(None, description="Also write one page with plots to this file.")

    @model_validator(mode="after")
    def _has_load(self) -> Self:
        if self.at_least and self.compare is None:
            raise ValueError("--at-least needs --compare")
        if not self.scenario and not self.users and not self.rate and not self.num_bulk_users:
            raise ValueError("nothing to send: --users, --rate and --bulk-users are all 0")
        return self

    @property
    def num_bulk_users(self) -> int:
        if self.bulk_users is None:
            return TIERS_BULK_USERS if self.compare == "tiers" else 0
        return self.bulk_users

    def classes(self) -> tuple[TrafficClass, ...]:
        """Return the classes of traffic that the flags describe. Raises `ScenarioError`."""
        if self.scenario:
            return tuple(load_scenario(self.scenario, needed=()).classes.values())
        found = []
        if self.rate:
            found.append(self._class("interactive", OpenLoop(rate_per_s=self.rate), self.service_tier))
        elif self.users:
            found.append(self._class("interactive", ClosedLoop(streams=self.users), self.service_tier))
        if self.num_bulk_users:
            found.append(self._class("bulk", ClosedLoop(streams=self.num_bulk_users), self.bulk_service_tier))
        return tuple(found)

    def _class(self, role: Literal["interactive", "bulk"], arrivals: Any, service_tier: str) -> TrafficClass:
        return TrafficClass(
            name=role,
            role=role,
            service_tier=service_tier or None,
            arrivals=arrivals,
            prompt_tokens=Lengths(min=self.prompt_tokens, max=self.prompt_tokens),
            output_tokens=Lengths(min=self.output_tokens, max=self.output_tokens),
            endpoint=self.endpoint,
            stream=self.stream,
        )

    def timing(self) -> Timing:
        rounds = self.rounds or (1 if self.compare is None else COMPARED_ROUNDS)
        settle_s = 0.0 if self.compare is None else 1.0
        return Timing(self.duration, rounds, lead_s=self.warm_up, settle_s=settle_s, drain_s=self.drain)

    def cli_cmd(self) -> None:
        try:
            with ends_on_sigterm():
                run_to_end(self._measure())
        except KeyboardInterrupt:
            raise _interrupted_early() from None

    async def _measure(self) -> None:
        if self.html is not None:
            require(PLOTS, "--html")
        classes = self.classes()
        async with AsyncExitStack() as stack:
            target = await self._server(stack)
            print_progress(f"asking {target} for {target.model}")
            arms = arms_of(self.compare, await checked(target, classes, self.seed))
            timing = self.timing()
            view = LiveView(Console(stderr=True), len(arms), timing.rounds)
            async with view.shown():
                measurement = await measure(target, arms, timing, self.seed, view)
        self._conclude(measurement, target)

    async def _server(self, stack: AsyncExitStack) -> Target:
        if not self.serve:
            return await self.target()
        print_progress("starting tidegate serve with the demo model")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-loadtest-")))
        command = tidegate_command(None, "auto", folder / "data", None, ())
        demo = serving(command, folder / "tidegate.log", "/ready", tidegate_environment())
        return (await stack.enter_async_context(demo)).target

    def _conclude(self, measurement: Measurement, target: Target) -> None:
        if not measurement.measured:
            raise _interrupted_early()
        options = self.model_dump(mode="json", exclude={"json_file", "html"})
        drawings = draw if self.html is not None else None
        record = load_record(measurement, options, self.provenance(target), drawings)
        with one_sentence(OSError):
            publish(record, self.json_file)
            if self.html is not None:
                print_progress(f"written: {write_page_file(self.html, record)}")
        if measurement.was_interrupted:
            raise SystemExit(INTERRUPTED)
        if not self._has_passed(figures_of(measurement)):
            raise SystemExit(1)

    def _has_passed(self, figures: Figures) -> bool:
        has_answers = all(f.summary.completed for classes in figures.values() for f in classes.values())
        gain = tokens_ratio(figures)
        return has_answers and (not self.at_least or (gain is not None and gain >= self.at_least))


def _interrupted_early() -> SystemExit:
    print("loadtest: interrupted before anything was measured", file=sys.stderr)
    return SystemExit(INTERRUPTED)


def draw(measurement: Measurement, figures: Figures) -> tuple[tuple[Drawing, ...], tuple[Drawing, ...]]:
    from loadtest.measure.plots import distribution_drawings, time_drawings  # imports matplotlib

    return distribution_drawings(figures), time_drawings(measurement)
