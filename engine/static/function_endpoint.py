"""An endpoint that is a Python function of the user's own: `python:module.function`.

The function gets a list of exactly B items and returns a list of B outputs, in the same order. An output that is an
exception is the error of its item; an exception that the function raises fails the whole call. An async function runs
in an event loop and a thread of its own, which it may block; any other in a thread.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

import msgspec

from engine.static.interface import CallFailed, EndpointHangs, ItemResult, padded, without_padding

MAX_REASON = 300  # characters of an exception's text that are kept
CANCEL_S = 1.0  # time that an async function gets to end after its time is over; one that blocks never does


class FunctionEndpoint:
    """Implements `engine.static.interface.Endpoint`."""

    def __init__(self, name: str, function: Callable[[list[Any]], Any], batch: int, timeout_s: float) -> None:
        """`timeout_s` is the longest time of a call."""
        self.name = name
        self._function = function
        self._batch = batch
        self._timeout_s = timeout_s
        self._loop = _start_loop() if inspect.iscoroutinefunction(function) else None

    async def call(self, items: Sequence[bytes], traceparent: str = "") -> list[ItemResult]:
        try:
            async with asyncio.timeout(self._longest_s):  # before Python 3.12, `wait_for` may swallow a cancellation
                return await asyncio.wrap_future(self._begin(items))
        except TimeoutError as error:
            raise EndpointHangs(f"{self.name} has not returned within {self._timeout_s:g} s") from error
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            raise _call_failed(error) from error

    @property
    def _longest_s(self) -> float:
        return self._timeout_s if self._loop is None else self._timeout_s + CANCEL_S

    def _begin(self, items: Sequence[bytes]) -> "Future[list[ItemResult]]":
        """Start the function. Whatever it raises arrives as `CallFailed`, also what would end a thread or a loop.

        Its thread also reads the items and writes the results, because large ones take long.
        """
        if self._loop is None:
            return _in_thread(lambda: self._results(self._function(self._decoded(items)), len(items)))
        return asyncio.run_coroutine_threadsafe(self._run_async(items), self._loop)

    def _decoded(self, items: Sequence[bytes]) -> list[Any]:
        return [msgspec.json.decode(item) for item in padded(items, self._batch)]

    def _results(self, outputs: Any, count: int) -> list[ItemResult]:
        if not isinstance(outputs, list | tuple):
            raise CallFailed(f"The function returned {type(outputs).__name__}, not a list.")
        return [_item_result(output) for output in without_padding(outputs, count, self._batch)]

    async def _run_async(self, items: Sequence[bytes]) -> list[ItemResult]:
        running = asyncio.timeout(self._timeout_s)
        try:
            async with running:
                outputs = await self._function(self._decoded(items))
            return self._results(outputs, len(items))
        except BaseException as error:
            if _is_cancelled():  # nobody waits for the outputs any more, unless the function did this itself
                raise
            if running.expired():
                raise CallFailed("The function did not return in time.") from error
            raise _call_failed(error) from error

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)


def _start_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own. What a function opens in it serves later calls too."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.close()

    Thread(target=run, name="endpoint", daemon=True).start()
    return loop


def _in_thread(work: Callable[[], list[ItemResult]]) -> "Future[list[ItemResult]]":
    """Run `work` in a thread that does not keep the process alive: it may never return."""
    future: Future[list[ItemResult]] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # from now on nobody cancels it, so its result can be set
        try:
            result = work()
        except BaseException as error:
            future.set_exception(_call_failed(error))
        else:
            future.set_result(result)

    Thread(target=run, name="endpoint", daemon=True).start()
    return future


def _is_cancelled() -> bool:
    """Return whether this task was told to end. A `CancelledError` may also come from what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _call_failed(error: BaseException) -> CallFailed:
    return error if isinstance(error, CallFailed) else CallFailed(f"The function raised {_reason(error)}")


def _item_result(output: Any) -> ItemResult:
    if isinstance(output, BaseException):
        return ItemResult(error=_reason(output))
    try:
        text = msgspec.json.encode(output)
        if b"null" in text and not _is_finite(msgspec.to_builtins(output)):  # msgspec writes null for NaN
            return ItemResult(error="The output is not JSON: it contains NaN or Infinity.")
    except Exception as error:
        return ItemResult(error=f"The output is not JSON: {_text(error)}"[:MAX_REASON])
    return ItemResult(text)


def _is_finite(value: object) -> bool:
    """Return whether all numbers in a JSON value are finite."""
    match value:
        case float():
            return math.isfinite(value)
        case list() | tuple():
            return all(map(_is_finite, value))
        case Mapping():
            return all(map(_is_finite, value.values()))
    return True


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {_text(error)}"[:MAX_REASON]


def _text(error: BaseException) -> str:
    """Return what the error says, without characters that UTF-8 does not have."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception:
        return "it cannot be told"
