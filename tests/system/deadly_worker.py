"""A worker of `tidegate serve` that dies at once in each step that runs a deadly prompt: a program for tests.

`python -m tests.system.deadly_worker serve …` serves with such a worker; the supervisor runs it with `worker …`.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace

from redis.asyncio import Redis

from engine.interface import StepPlan
from engine.native.execution.torch_engine import TorchEngine
from tidegate import cli, serve
from tidegate.settings.commands import ServeSettings
from tidegate.supervision.keeper import Part

DEADLY_PROMPT = (9,) * 7


def kill_in_deadly_steps() -> None:
    """Let the process end without a word in each step that runs a sequence with `DEADLY_PROMPT`."""
    launch: Callable[[TorchEngine, StepPlan], None] = TorchEngine.launch
    deadly: set[str] = set()

    def launch_or_die(engine: TorchEngine, plan: StepPlan) -> None:
        deadly.update(new.seq_id for new in plan.start if new.prompt_token_ids == DEADLY_PROMPT)
        if deadly & {run.seq_id for run in plan.run}:
            os._exit(70)
        launch(engine, plan)

    TorchEngine.launch = launch_or_die  # type: ignore[method-assign]


def serve_with_deadly_workers() -> None:
    """Let `serve` start this program as its worker."""
    usual_parts = serve.served_parts

    def own_parts(settings: ServeSettings, client: Redis) -> list[Part]:
        worker, gateway = usual_parts(settings, client)
        argv = tuple("tests.system.deadly_worker" if part == "tidegate" else part for part in worker.argv)
        return [replace(worker, argv=argv), gateway]

    serve.served_parts = own_parts


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        kill_in_deadly_steps()
    else:
        serve_with_deadly_workers()
    cli.main()
