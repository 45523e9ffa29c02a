"""How a command runs: to its end or to one sentence about what the user can correct; and how it finds a running server.

Knows exit codes, signals and the variable of the API key; not commands.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp

from loadtest.client.http import Target, TargetError, discover_model, parse_target
from loadtest.extras import MissingExtra
from loadtest.traffic.scenario import ScenarioError


def run_cli(commands: type[BaseSettings], said_by: str, arguments: Sequence[str]) -> None:
    """Run the subcommand that `arguments` name. Each flag with a wrong value is one line, and the exit code is 2."""
    try:
        CliApp.run(commands, cli_args=list(arguments))
    except ValidationError as error:
        if error.title != commands.__name__:  # a defect of the command, not a wrong flag
            raise
        for found in error.errors(include_url=False):
            *command, flag = map(str, found["loc"])
            print(f"{said_by}: {' '.join(command)} --{flag.replace('_', '-')}: {found['msg']}", file=sys.stderr)
        raise SystemExit(2) from error


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run the work. An error that the user can correct becomes one sentence and exit code 2."""
    with one_sentence(TargetError, ScenarioError, TimeoutError):
        asyncio.run(work)


@contextmanager
def one_sentence(*errors: type[Exception], said_by: str = "loadtest") -> Iterator[None]:
    """Turn these errors, and missing packages, into one sentence and exit code 2."""
    expected: tuple[type[Exception], ...] = (MissingExtra, *errors)
    try:
        yield
    except expected as error:
        empty = "not done within the timeout" if isinstance(error, TimeoutError) else type(error).__name__
        print(f"{said_by}: {str(error) or empty}", file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end the block as Ctrl-C does, so that everything started in it is ended too. For the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def running_server(url: str, allow_remote: bool, model: str = "") -> Target:
    """Return the address of a server that already runs. Raises `TargetError`.

    Without `model`, the first model that it lists is used. The API key is read from TIDEGATE_API_KEY.
    """
    target = parse_target(url, allow_remote, os.environ.get("TIDEGATE_API_KEY", ""))
    return replace(target, model=model or await discover_model(target))


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
