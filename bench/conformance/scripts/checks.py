"""What the scripts of the clients have in common: checks, and one line of JSON for the outcome of each.

A script runs in an environment of its own, with its client and without this project.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

BASE_URL = os.environ["CONFORMANCE_BASE_URL"]  # ends with /v1
MODEL = os.environ["CONFORMANCE_MODEL"]
API_KEY = "conformance"  # the server asks for none, but clients want one

_checks: list[tuple[str, Callable[[], Any]]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a check, which may be a coroutine function. Its docstring says what it shows."""
    _checks.append((inspect.getdoc(function) or function.__name__, function))
    return function


def main() -> None:
    """Run all checks, and print a line for each. An exception is a failed check."""
    for name, function in _checks:
        error = ""
        try:
            outcome = function()
            if inspect.isawaitable(outcome):
                asyncio.run(_awaited(outcome))
        except Exception as exception:  # whatever the client raises
            error = f"{type(exception).__name__}: {exception}"[:500]
        print(json.dumps({"check": name, "error": error}), flush=True)
    sys.exit(0)


async def _awaited(outcome: Any) -> None:
    await outcome
