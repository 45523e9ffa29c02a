"""The command line: `python -m loadtest <command>`, also reached as `tidegate loadtest`.

Knows flags, exit codes and where results are written; the work of each command is in its own module.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field
from pydantic_settings import BaseSettings, CliApp, CliPositionalArg, CliSubCommand, SettingsConfigDict

from loadtest.calibration.command import Calibrate
from loadtest.checks.mixed import run_mixed
from loadtest.checks.nonce import run_nonces
from loadtest.checks.report import mixed_record, nonce_record, streams_record
from loadtest.checks.streams import run_streams
from loadtest.client.http import Target
from loadtest.client.runner import Timing
from loadtest.model_shapes import write_dummy_model
from loadtest.reporting.output import publish
from loadtest.reporting.record import Provenance, Record
from loadtest.running import print_progress, run_cli, run_to_end, running_server
from loadtest.simulation.command import Simulate
from loadtest.traffic.scenario import load_scenario

# Former commands of `python -m loadtest`, and their present names in `python -m bench`.
MOVED_TO_BENCH = {
    "coserve": "isolation",
    "locust": "locust",
    "engine": "engines",
    "growth": "growth",
    "soak": "soak",
    "compare": "simulator-accuracy",
    "queue": "store",
}


class _AgainstServer(BaseModel):
    """The base of the commands that measure a running server: their common flags, and how a command ends."""

    url: str = Field("http://127.0.0.1:8000", description="Base URL of an OpenAI-compatible server.")
    model: str = Field("", description="Model to ask for; empty: the first that the server lists.")
    allow_remote: bool = Field(False, description="Accept a URL that is not this machine.")
    seed: int = Field(1, ge=0, description="The same seed sends the same requests.")
    json_file: Path | None = Field(
        None, validation_alias=AliasChoices("json"), description="Also write the result to this file."
    )

    async def target(self) -> Target:
        return await running_server(self.url, self.allow_remote, self.model)

    def provenance(self, target: Target) -> Provenance:
        return Provenance.of_this_run(target.model, self.seed)

    def conclude(self, record: Record, *, passed: bool) -> None:
        publish(record, self.json_file)
        if not passed:
            raise SystemExit(1)


class Mixed(_AgainstServer):
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


class Nonce(_AgainstServer):
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


class Streams(_AgainstServer):
    """Send the same requests all at once and one at a time, in alternating rounds.

    Prints the tokens per second of both ways, and their ratio.
    """

    streams: int = Field(32, ge=1, le=512, description="Number of requests, which all run at once.")
    prompt_tokens: int = Field(32, ge=1, le=100_000, description="Tokens of each prompt.")
    output_tokens: int = Field(64, ge=1, le=100_000, description="Tokens of each answer.")
    rounds: int = Field(2, ge=1, le=32, description="Number of times that all requests are sent at once.")
    service_tier: str = Field("default", description="`service_tier` of the requests.")
    at_least: float = Field(0.0, ge=0, description="Exit with 1 if the ratio is smaller than this.")
    timeout: float = Field(600.0, gt=0, le=3600, description="Seconds for the whole measurement.")

    def cli_cmd(self) -> None:
        run_to_end(self._compare())

    async def _compare(self) -> None:
        target = await self.target()
        result = await run_streams(
            target,
            streams=self.streams,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            rounds=min(self.rounds, self.streams),
            service_tier=self.service_tier or None,
            seed=self.seed,
            timeout_s=self.timeout,
            report_progress=print_progress,
        )
        failed = result.together.errors + result.one_at_a_time.errors
        passed = not failed and result.speedup is not None and result.speedup >= self.at_least
        self.conclude(streams_record(result, self.provenance(target)), passed=passed)


class DummyModel(BaseModel):
    """Write the config of the reference shape of 135 M parameters. Serve it with `--load-format dummy`."""

    directory: CliPositionalArg[Path] = Field(description="Directory for config.json.")

    def cli_cmd(self) -> None:
        print(write_dummy_model(self.directory))


class LoadTest(BaseSettings):
    """Load tests for Tidegate and any other OpenAI-compatible server. Open-loop requests do not wait for answers. The
    same seed sends the same requests. Arms that are compared take turns in one run.

    Commands for a server: mixed: measures how much bulk traffic slows interactive traffic down. nonce: checks that no
    answer holds tokens of another request. streams: measures the throughput that batching gains. dummy-model: writes
    the config of a reference model to serve. The API key of a server is read from TIDEGATE_API_KEY.

    Command for an engine: calibrate: measures the cost of its steps, and writes it as a card for the simulator.

    Command in virtual time: simulate: runs the shipped scheduler on modeled engines (also `tidegate simulate`).

    Plots need `pip install 'tidegate[loadtest]'`. Experiments with other systems and policies are in `python -m bench`,
    in a checkout of the repository.
    """

    model_config = SettingsConfigDict(
        env_prefix="TIDEGATE_LOADTEST_",
        cli_prog_name="python -m loadtest",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
    )

    mixed: CliSubCommand[Mixed]
    nonce: CliSubCommand[Nonce]
    streams: CliSubCommand[Streams]
    simulate: CliSubCommand[Simulate]
    calibrate: CliSubCommand[Calibrate]
    dummy_model: CliSubCommand[DummyModel]

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and (moved_to := MOVED_TO_BENCH.get(arguments[0])):
        print(
            f"loadtest: {arguments[0]} has moved: run `python -m bench {moved_to}` in a checkout of the repository",
            file=sys.stderr,
        )
        raise SystemExit(2)
    run_cli(LoadTest, "loadtest", arguments)


if __name__ == "__main__":
    main()
