"""The command line of the laboratory: `python -m bench <command>`, in a checkout of the repository.

Knows flags and exit codes; the work of each command is in its own module.
"""

import sys
from collections.abc import Sequence

from pydantic_settings import BaseSettings, CliApp, CliSubCommand, SettingsConfigDict

from bench.engines.commands import Engines, Growth, Soak
from bench.isolation.command import Isolation
from bench.locust.command import Locust
from bench.simulator_accuracy import SimulatorAccuracy
from bench.store_throughput import Store
from loadtest.running import run_cli

FORMER_NAMES = {"coserve": "isolation", "engine": "engines", "queue": "store", "compare": "simulator-accuracy"}


class Bench(BaseSettings):
    """Experiments that compare Tidegate with other systems, with other policies and with its own simulator.

    Against a server: isolation: interactive beside bulk under several policies, against goals. locust: continuous
    batching against one at a time.

    Against an engine: engines: ours beside others. growth: a step against streams, context, model. soak: under load for
    long.

    The rest: store: what a real store carries. simulator-accuracy: a measured run against its simulation. Plots and
    Locust need `pip install 'tidegate[loadtest]'`. `python -m bench.gpu_check` runs what only a GPU can tell."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEGATE_BENCH_",
        cli_prog_name="python -m bench",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
    )

    isolation: CliSubCommand[Isolation]
    locust: CliSubCommand[Locust]
    engines: CliSubCommand[Engines]
    growth: CliSubCommand[Growth]
    soak: CliSubCommand[Soak]
    store: CliSubCommand[Store]
    simulator_accuracy: CliSubCommand[SimulatorAccuracy]

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in FORMER_NAMES:
        arguments[0] = FORMER_NAMES[arguments[0]]
    run_cli(Bench, "bench", arguments)


if __name__ == "__main__":
    main()
