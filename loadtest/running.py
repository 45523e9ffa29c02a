"""How a command's work is run: to its end or to one sentence about what the user can mend, and never half-ended; and
how it finds a server that is running.

Knows exit codes, signals and the API key's variable; not commands.
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
    """What the user can mend becomes one sentence and exit code 2."""
    with one_sentence(TargetError, ScenarioError, TimeoutError):
        asyncio.run(work)


@contextmanager
def one_sentence(*errors: type[Exception], said_by: str = "loadtest") -> Iterator[None]:
    """These errors, and missing packages, become one sentence and exit code 2: the user can mend them."""
    expected: tuple[type[Exception], ...] = (MissingExtra, *errors)
    try:
        yield
    except expected as error:
        empty = "not done within the timeout" if isinstance(error, TimeoutError) else type(error).__name__
        print(f"{said_by}: {str(error) or empty}", file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does: whatever was started in it is ended too. For the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def running_server(url: str, allow_remote: bool, model: str = "") -> Target:
    """One that somebody else has started: its model, unless one is named, is the first that it lists; its API key is
    TIDEGATE_API_KEY's. Raises `TargetError`."""
    target = parse_target(url, allow_remote, os.environ.get("TIDEGATE_API_KEY", ""))
    return replace(target, model=model or await discover_model(target))


def say_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
