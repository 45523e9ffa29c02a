"""How a command runs to its end: errors in one sentence, SIGTERM, optional packages, and a server that already runs.

Knows exit codes, signals and the environment variable of the API key; does not know commands.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from inspect import cleandoc
from types import NoneType
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp

from loadtest.client.http import Target, TargetError, discover_model, parse_target
from loadtest.traffic.scenario import ScenarioError

PLOTS = ("matplotlib",)
PROCESSES = ("psutil",)  # locust, which the extra has, installs it


class MissingExtra(Exception):
    """A package that the command needs is not installed. The message says how to install it."""


def require(packages: tuple[str, ...], purpose: str) -> None:
    """Check that all `packages` are installed. Raises `MissingExtra` if any is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"{purpose} needs {' and '.join(missing)}: pip install 'tidegate[loadtest]'")


def run_cli(commands: type[BaseSettings], said_by: str, arguments: Sequence[str]) -> None:
    """Run the subcommand that `arguments` name.

    If flags have wrong values, print one line for each of them and exit with code 2.
    """
    subcommands = [kind for field in commands.model_fields.values() for kind in get_args(field.annotation)]
    for command in (commands, *subcommands):
        if command is not NoneType and command.__doc__:  # the texts of --help
            command.__doc__ = cleandoc(command.__doc__)
    try:
        CliApp.run(commands, cli_args=list(arguments))
    except ValidationError as error:
        if error.title != commands.__name__:  # the error is a defect of the command, not a wrong flag
            raise
        for found in error.errors(include_url=False):
            *command, last = map(str, found["loc"])
            what = f" {' '.join(command)} --{last.replace('_', '-')}" if command else f" {last}"
            print(f"{said_by}:{what}: {found['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        raise SystemExit(2) from error


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine `work`. For an error that the user can correct, print one sentence and exit with code 2."""
    with one_sentence(TargetError, ScenarioError, TimeoutError):
        asyncio.run(work)


@contextmanager
def one_sentence(*errors: type[Exception], said_by: str = "loadtest") -> Iterator[None]:
    """If the block raises one of `errors` or `MissingExtra`, print one sentence and exit with code 2."""
    expected: tuple[type[Exception], ...] = (MissingExtra, *errors)
    try:
        yield
    except expected as error:
        empty = "not done within the timeout" if isinstance(error, TimeoutError) else type(error).__name__
        print(f"{said_by}: {str(error) or empty}", file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end the block as Ctrl-C does, so that everything started in the block is stopped too.

    Works only in the main thread.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def running_server(url: str, allow_remote: bool, model: str = "") -> Target:
    """Return the address of a server that is already running. Raises `TargetError`.

    If `model` is empty, the first model in the server's list is used. The API key is read from TIDEGATE_API_KEY, or
    from OPENAI_API_KEY.
    """
    api_key = os.environ.get("TIDEGATE_API_KEY") or os.environ.get("OPENAI_API_KEY", "")
    target = parse_target(url, allow_remote, api_key)
    return replace(target, model=model or await discover_model(target))


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
