"""An endpoint that is a Python function of the user's own: `python:module.function`.

The function gets a list of exactly B items and returns a list of B outputs, in the same order. An output that is an
exception is the error of its item; an exception that the function raises fails the whole call. An async function runs
in the worker's event loop, any other in a thread.
"""

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from engine.config import EngineStartError
from engine.static.interface import CallFailed, EndpointHangs, ItemResult
from engine.static.padding import padded, without_padding

PREFIX = "python:"
MAX_REASON = 300  # characters of an exception's text that are kept


class FunctionEndpoint:
    """Implements `engine.static.interface.Endpoint`."""

    def __init__(self, name: str, function: Callable[[list[Any]], Any], batch: int, timeout_s: float) -> None:
        """`timeout_s` is the longest time of a call."""
        self.name = name
        self._function = function
        self._batch = batch
        self._timeout_s = timeout_s

    async def call(self, items: Sequence[bytes], traceparent: str = "") -> list[ItemResult]:
        decoded = [msgspec.json.decode(item) for item in padded(items, self._batch)]
        try:
            async with asyncio.timeout(self._timeout_s):
                outputs = await self._run(decoded)
        except TimeoutError as error:
            if inspect.iscoroutinefunction(self._function):
                raise CallFailed("The function did not return in time.") from error
            raise EndpointHangs(f"{self.name} has not returned within {self._timeout_s:g} s") from error
        if not isinstance(outputs, list | tuple):
            raise CallFailed(f"The function returned {type(outputs).__name__}, not a list.")
        return [_item_result(output) for output in without_padding(outputs, len(items), self._batch)]

    async def _run(self, items: list[Any]) -> Any:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(items)
            return await _in_thread(self._function, items)
        except (TimeoutError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise CallFailed(f"The function raised {_reason(error)}") from error

    async def close(self) -> None:
        return None


async def _in_thread(function: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    """Run the function in a thread that does not keep the process alive: it may never return."""
    future: Future[Any] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # from now on nobody cancels it, so its result can be set
        try:
            result = function(items)
        except BaseException as error:
            # A function's own TimeoutError must not look like the end of the time for the call.
            future.set_exception(RuntimeError(_reason(error)) if isinstance(error, TimeoutError) else error)
        else:
            future.set_result(result)

    Thread(target=run, name="endpoint", daemon=True).start()
    return await asyncio.wrap_future(future)


def _item_result(output: Any) -> ItemResult:
    if isinstance(output, BaseException):
        return ItemResult(error=_reason(output))
    try:
        return ItemResult(msgspec.json.encode(output))
    except (TypeError, ValueError, RecursionError) as error:
        return ItemResult(error=f"The output is not JSON: {error}"[:MAX_REASON])


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


def load_function(spec: str) -> Callable[[list[Any]], Any]:
    """Return the function that `python:module.function` names. Modules of the working directory are found too."""
    module_name, _, function_name = spec.removeprefix(PREFIX).rpartition(".")
    if not module_name or not function_name:
        raise EngineStartError(f"{spec!r} names no function: write python:module.function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise EngineStartError(f"the endpoint {spec} cannot be loaded: {error}") from error
    if not callable(function):
        raise EngineStartError(f"the endpoint {spec} is not a function")
    return function  # type: ignore[no-any-return]
