"""The commands that compare our server with vLLM's over HTTP, and the flags of each."""

import re
from contextlib import AsyncExitStack
from pathlib import Path

from pydantic import AliasChoices, Field

from bench.isolation.admin import tiers_restored
from bench.isolation.slos import slos_by_class
from bench.isolation.summary import summarize_arms
from bench.peers.arms import ARMS, DEFAULT, VLLM, parse_arms
from bench.peers.closed_loops import Loops, run_closed_loops
from bench.peers.closed_loops_report import loops_record
from bench.peers.command import PeerCommand
from bench.peers.frontier import frontier_arms, points_of, run_frontier
from bench.peers.frontier_report import draw_frontier, frontier_record
from loadtest.client.http import TargetError
from loadtest.client.runner import MAX_IN_FLIGHT, Timing
from loadtest.reporting.record import Drawing
from loadtest.reporting.writers import write_page
from loadtest.running import PLOTS, print_progress, require
from loadtest.shipped_tiers import read_shipped_tiers
from loadtest.traffic.scenario import Targets, load_scenario
from scheduler.config import parse_tiers

ARMS_HELP = "Arms to compare: default and flex are our service tiers."


class ClosedLoops(PeerCommand):
    """Closed loops of some numbers of streams, on our server in two service tiers and on vLLM's server.

    The arms take turns on the same weights. Reports tokens per second, first tokens, gaps and ratios to vLLM, judged by
    goals.
    """

    arms: str = Field(",".join(ARMS), description=ARMS_HELP)
    streams: str = Field("8,32,64,128", pattern=r"^[1-9]\d*(,[1-9]\d*)*$", description="Numbers of streams.")
    requests_per_stream: int = Field(3, ge=1, le=1000, description="Requests that a stream sends one after another.")
    prompt_tokens: str = Field("32-256", description="Lowest and highest length of a prompt, in tokens.")
    new_tokens: int = Field(64, ge=1, le=100_000, description="New tokens of a request.")
    rounds: int = Field(2, ge=1, le=100, description="Times that every arm gets every number of streams.")

    async def measure(self) -> None:
        arms, loops = parse_arms(self.arms), self._loops()
        async with self.servers(arms) as servers:
            parts = await run_closed_loops(servers, arms, loops, print_progress)
            model = servers.all[0].target.model
        self.conclude(loops_record(parts, loops, arms), model)

    def _loops(self) -> Loops:
        streams = tuple(int(number) for number in self.streams.split(","))
        if max(streams) > MAX_IN_FLIGHT:
            raise TargetError(f"--streams: at most {MAX_IN_FLIGHT}, since each stream is an open connection")
        return Loops(
            streams[:1] if self.quick else streams,
            self.requests_per_stream,
            parse_range(self.prompt_tokens),
            self.new_tokens,
            1 if self.quick else self.rounds,
            self.settle,
            self.seed,
        )


class Frontier(PeerCommand):
    """Bulk's harvest against the slowdown of interactive traffic, for some values of `max_slowdown` and for vLLM.

    The arms take turns on the same weights. vLLM takes part with --vllm-python or --peer-url.
    """

    slowdowns: str = Field(
        "1.1,1.25,1.5,2,4",
        pattern=r"^([1-9]\d*(\.\d+)?(,[1-9]\d*(\.\d+)?)*)?$",
        description="Values of `max_slowdown`; may be empty.",
    )
    scenario: str = Field("peers", description="A shipped scenario, or a YAML file.")
    duration: float = Field(60.0, gt=0, le=7200, description="Seconds measured of each arm.")
    rounds: int = Field(2, ge=1, le=100, description="Number of parts that each arm's duration is divided into.")
    lead: float = Field(5.0, ge=0, le=120, description="Seconds of bulk before each part is measured.")
    drain: float = Field(
        20.0, ge=0, le=600, description="Seconds that interactive requests may take after the end of a part."
    )
    report_dir: Path | None = Field(
        None, validation_alias=AliasChoices("report"), description="Also write a page, index.html, into this directory."
    )

    async def measure(self) -> None:
        if self.report_dir is not None:
            require(PLOTS, "--report")
        has_vllm = bool(self.peer_url) or self.vllm_python is not None
        tiers, scenario, timing = read_shipped_tiers(), load_scenario(self.scenario), self._timing()
        arms = frontier_arms(tiers, [float(value) for value in self.slowdowns.split(",") if value], has_vllm)
        slos = slos_by_class(scenario, parse_tiers(tiers), Targets())
        async with AsyncExitStack() as stack:
            needed = (DEFAULT, VLLM) if has_vllm else (DEFAULT,)
            servers = await stack.enter_async_context(self.servers(needed, policy="priority"))
            if self.url:
                await stack.enter_async_context(tiers_restored(servers.target(DEFAULT)))
            run = await run_frontier(servers, arms, scenario, timing, self.seed, print_progress)
        measured = summarize_arms(run.rounds, scenario, slos)
        drawings: tuple[Drawing, ...] = ()
        if self.report_dir is not None:
            drawings = draw_frontier(points_of(measured))
        record = frontier_record(run, measured, scenario, timing, slos, drawings)
        record = self.conclude(record, servers.target(DEFAULT).model)
        if self.report_dir is not None:
            print(f"\nwritten: {write_page(self.report_dir, record)}")

    def _timing(self) -> Timing:
        if self.quick:
            return Timing(3.0, 1, 0.5, self.settle, self.drain)
        return Timing(self.duration, self.rounds, self.lead, self.settle, self.drain)


def parse_range(text: str) -> tuple[int, int]:
    """Return the bounds of a range such as `32-256`, or of a single number. Raises `TargetError`."""
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text.strip())
    if found is None:
        raise TargetError(f"--prompt-tokens: {text!r} is not a range such as 32-256")
    low = int(found[1])
    high = int(found[2] or low)
    if low > high:
        raise TargetError(f"--prompt-tokens: {text!r} must begin with the lower bound")
    return low, high
