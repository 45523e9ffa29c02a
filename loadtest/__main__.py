"""The command line: `tidegate loadtest <command>`, also reached as `python -m loadtest`.

Knows flags, exit codes and where results are written; the work of each command is in its own module.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import BaseSettings, CliApp, CliPositionalArg, CliSubCommand, SettingsConfigDict

from loadtest.calibration.command import Calibrate
from loadtest.checks.mixed import run_mixed
from loadtest.checks.nonce import run_nonces
from loadtest.checks.report import mixed_record, nonce_record
from loadtest.client.runner import Timing
from loadtest.commands import ServerCommand
from loadtest.measure.command import Run
from loadtest.model_shapes import write_dummy_model
from loadtest.running import print_progress, run_cli, run_to_end
from loadtest.simulation.command import Simulate
from loadtest.traffic.scenario import load_scenario

_IN_BENCH = "`python -m bench {}` in a checkout of the repository"
# Former commands, and what replaces them.
MOVED = {
    "streams": "`tidegate loadtest run --compare batching`",
    "coserve": _IN_BENCH.format("isolation"),
    "locust": "`tidegate loadtest run --compare batching`",
    "engine": _IN_BENCH.format("engines"),
    "compare": _IN_BENCH.format("simulator-accuracy"),
}


class Mixed(ServerCommand):
    """Measure isolation: interactive traffic alone, bulk traffic alone and both together, in alternating rounds.

    Prints the latencies of each traffic class in each arm, and the isolation ratios.
    """

    scenario: str = Field("chat-and-bulk", description="A shipped scenario, or a YAML file.")
    bulk_pool: str = Field("", description="A shipped bulk pool in place of the scenario's own bulk.")
    scale: float = Field(1.0, gt=0, le=10, description="Factor of all lengths, for models with a shorter context.")
    duration: float = Field(30.0, gt=0, le=3600, description="Seconds measured of each arm.")
    rounds: int = Field(2, ge=1, le=100, description="Number of parts that each arm's duration is divided into.")
    lead: float = Field(3.0, ge=0, le=60, description="Seconds of bulk before each part is measured.")
    settle: float = Field(1.0, ge=0, le=60, description="Seconds of rest before each part.")

    def cli_cmd(self) -> None:
        run_to_end(self._measure())

    async def _measure(self) -> None:
        scenario = load_scenario(self.scenario, self.bulk_pool).with_lengths_scaled(self.scale)
        target = await self.target()
        result = await run_mixed(
            target,
            scenario,
            Timing(self.duration, self.rounds, self.lead, self.settle),
            self.seed,
            print_progress,
        )
        record = mixed_record(result, scenario.model_dump(mode="json"), self.provenance(target))
        self.conclude(record, passed=result.has_answers)


class Nonce(ServerCommand):
    """Send concurrent requests over the service tiers, half of them streamed; each asks for its own nonce.

    The exit code is 1 unless every answer is exactly the nonce of its request.
    """

    requests: int = Field(64, ge=1, le=512, description="Number of requests, sent all at once.")
    service_tiers: str = Field("default,flex", description="Values of `service_tier` to alternate between.")
    timeout: float = Field(120.0, gt=0, le=3600, description="Seconds for all requests together.")

    def cli_cmd(self) -> None:
        run_to_end(self._verify())

    async def _verify(self) -> None:
        target = await self.target()
        tiers = [tier.strip() for tier in self.service_tiers.split(",") if tier.strip()]
        result = await run_nonces(
            target,
            requests=self.requests,
            service_tiers=tiers or ["default"],
            seed=self.seed,
            timeout_s=self.timeout,
        )
        self.conclude(nonce_record(result, self.provenance(target)), passed=result.passed)


class DummyModel(BaseModel):
    """Write the config of the reference shape of 135 M parameters. Serve it with `--load-format dummy`."""

    directory: CliPositionalArg[Path] = Field(description="Directory for config.json.")

    def cli_cmd(self) -> None:
        print(write_dummy_model(self.directory))


class LoadTest(BaseSettings):
    """Load tests for Tidegate and any other OpenAI-compatible server. Open-loop requests do not wait for answers. The
    same seed sends the same requests. Arms that are compared take turns in one run.

    Commands for a server: run: measures latencies and throughput, and compares tiers on and off, or batching and one
    request at a time. mixed: measures how much bulk traffic slows interactive traffic down. nonce: checks that no
    answer holds tokens of another request. dummy-model: writes the config of a reference model to serve. The API key of
    a server is read from TIDEGATE_API_KEY, or OPENAI_API_KEY.

    Command for an engine: calibrate: measures the cost of its steps, and writes it as a card for the simulator.

    Command in virtual time: simulate: runs the shipped scheduler on modeled engines (also `tidegate simulate`).

    Plots need `pip install 'tidegate[loadtest]'`. Experiments with other systems and policies are in `python -m bench`,
    in a checkout of the repository.
    """

    model_config = SettingsConfigDict(
        env_prefix="TIDEGATE_LOADTEST_",
        cli_prog_name="tidegate loadtest",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
    )

    run: CliSubCommand[Run]
    mixed: CliSubCommand[Mixed]
    nonce: CliSubCommand[Nonce]
    simulate: CliSubCommand[Simulate]
    calibrate: CliSubCommand[Calibrate]
    dummy_model: CliSubCommand[DummyModel]

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and (moved_to := MOVED.get(arguments[0])):
        print(f"loadtest: {arguments[0]} has moved: run {moved_to}", file=sys.stderr)
        raise SystemExit(2)
    run_cli(LoadTest, "loadtest", arguments)


if __name__ == "__main__":
    main()
