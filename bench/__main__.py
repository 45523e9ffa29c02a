"""The command line of the experiments: `python -m bench <command>`, in a checkout of the repository.

Knows flags and exit codes; the work of each command is in its own module.
"""

import sys
from collections.abc import Sequence

from pydantic_settings import BaseSettings, CliApp, CliSubCommand, SettingsConfigDict

from bench.chaos.command import Chaos
from bench.chaos.door import Door
from bench.conformance.command import Conformance
from bench.engines.commands import Engines
from bench.facade import Facade
from bench.fairness import Fairness
from bench.fuzz.command import Fuzz
from bench.images.command import Images
from bench.isolation.command import Isolation
from bench.peers.command import ClosedLoops
from bench.readme_figures import ReadmeFigures
from bench.simulator_accuracy import SimulatorAccuracy
from bench.store.command import Store
from bench.vllm_surface import VllmSurface
from loadtest.progress import progress
from loadtest.running import run_cli


class Bench(BaseSettings):
    """Experiments that compare Tidegate with other systems, with other policies and with its own simulator.

    Experiments on a server. isolation: interactive and bulk traffic together under several policies, judged by goals;
    with --experiment frontier, what bulk gets against how much slower interactive answers become. fairness: one key's
    chats beside another key's floods.

    Experiments on our server and vLLM's, which take turns. closed-loops: throughput and first tokens with many streams.

    Experiments on an engine. engines: our engine compared with other systems.

    Experiments on the HTTP side. conformance: clients that people use, in their default modes. facade: requests per
    second of the gateway, beside LiteLLM's proxy. fuzz: odd requests, and what they leave behind.

    Faults. chaos: the whole server under load, while its parts are killed, stopped, cut off and misled. door: what
    attacks without a key do to another client's stream.

    Images. images: the images of gateway and worker, built, started with a store, and tried.

    Other experiments. simulator-accuracy: a measured run compared with its simulation. readme: the figures of the
    README, in one sitting. store: the store's CPU time for idle workers, requests and a dead worker. vllm-surface: what
    a release of vLLM lacks of what our engine over it uses.

    Plots need `pip install 'tidegate[loadtest]'`. `python -m bench.gpu_check` runs the checks that need a GPU."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEGATE_BENCH_",
        cli_prog_name="python -m bench",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
    )

    isolation: CliSubCommand[Isolation]
    closed_loops: CliSubCommand[ClosedLoops]
    engines: CliSubCommand[Engines]
    simulator_accuracy: CliSubCommand[SimulatorAccuracy]
    conformance: CliSubCommand[Conformance]
    facade: CliSubCommand[Facade]
    fairness: CliSubCommand[Fairness]
    chaos: CliSubCommand[Chaos]
    door: CliSubCommand[Door]
    fuzz: CliSubCommand[Fuzz]
    images: CliSubCommand[Images]
    readme: CliSubCommand[ReadmeFigures]
    store: CliSubCommand[Store]
    vllm_surface: CliSubCommand[VllmSurface]

    def cli_cmd(self) -> None:
        name = next(field for field in type(self).model_fields if getattr(self, field) is not None)
        with progress(name.replace("_", "-")):
            CliApp.run_subcommand(self)


def main(argv: Sequence[str] | None = None) -> None:
    run_cli(Bench, "bench", list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    main()
