"""A worker of `tidegate serve` that dies at once in each step that runs a deadly prompt: a program for tests.

`python -m tests.system.deadly_worker serve …` serves with such a worker; the supervisor runs it with `worker …`.
"""

import os
import sys
from collections.abc import Callable

from engine.interface import StepPlan
from engine.native.execution.torch_engine import TorchEngine
from tidegate import cli, serve

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
    command = serve._command

    def own_command(name: str, *arguments: object) -> tuple[str, ...]:
        usual = command(name, *arguments)  # type: ignore[arg-type]
        if name != "worker":
            return usual
        return tuple("tests.system.deadly_worker" if part == "tidegate" else part for part in usual)

    serve._command = own_command


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        kill_in_deadly_steps()
    else:
        serve_with_deadly_workers()
    cli.main()
