"""The call of an endpoint with fixed batches: padding, the wire format, and every way in which a call fails."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import EngineStartError
from engine.static.factory import open_endpoint
from engine.static.function_endpoint import FunctionEndpoint
from engine.static.http_endpoint import HttpEndpoint
from engine.static.interface import CallFailed, Endpoint, EndpointHangs, ItemResult, Unreachable
from tests.engine.static.endpoints import BATCH, Answer, double, http_transport

HERE = "python:tests.engine.static.endpoints"


@asynccontextmanager
async def http_endpoint(answer: Answer) -> AsyncIterator[HttpEndpoint]:
    endpoint = HttpEndpoint("http://user:secret@endpoint.example/run", BATCH, 5.0, http_transport(answer))
    yield endpoint
    await endpoint.close()


def function_endpoint(
    function: Callable[[list[Any]], Any], timeout_s: float = 30.0, *, as_async: bool = False
) -> FunctionEndpoint:
    async def later(items: list[Any]) -> Any:
        return function(items)

    return FunctionEndpoint("python:test", later if as_async else function, BATCH, timeout_s)


async def failure_of(endpoint: Endpoint) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await endpoint.call([b"1"])
    return caught.value


def results_of(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"results": [{"output": {"of": item}} for item in body["items"]]})


async def test_http_sends_exactly_a_batch_and_discards_the_padding() -> None:
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> httpx.Response:
        seen.append(body)
        return results_of(body)

    async with http_endpoint(answer) as endpoint:
        results = await endpoint.call([b'{"text":"x"}', b"2.50"])
    assert seen == [{"items": [{"text": "x"}, 2.5, 2.5, 2.5], "count": 2}]
    assert results == [ItemResult(b'{"of":{"text":"x"}}'), ItemResult(b'{"of":2.5}')]


async def test_http_items_may_fail_alone() -> None:
    entries = [{"error": "too long"}, {"output": None}, {}, {"error": ""}]
    async with http_endpoint(lambda body: httpx.Response(200, json={"results": entries})) as endpoint:
        results = await endpoint.call([b"1", b"2", b"3", b"4"])
    assert [r.error for r in results] == ["too long", "", "", "The endpoint gave no reason."]
    assert results[1].output == results[2].output == b"null"


def busy(status: int, retry_after: str = "7") -> httpx.Response:
    return httpx.Response(status, headers={"retry-after": retry_after})


@pytest.mark.parametrize(
    ("response", "reason", "excused_s", "retry_after_s"),
    [
        (httpx.Response(500, text="boom"), "500: boom", 0.0, 0.0),
        (httpx.Response(200, text="<html>"), "not {", 0.0, 0.0),
        (httpx.Response(200, json={"results": [{"output": 1}]}), "1 results for a batch of 4", 0.0, 0.0),
        (httpx.Response(200, json={"results": 3}), "not {", 0.0, 0.0),
        (busy(429), "429", math.inf, 7.0),
        (busy(503), "503", 300.0, 7.0),
        (busy(502), "502", 30.0, 7.0),
        (busy(504, "Wed, 21 Oct 2065 07:28:00 GMT"), "504", 30.0, 0.0),
    ],
)
async def test_http_answers_that_fail_the_call(
    response: httpx.Response, reason: str, excused_s: float, retry_after_s: float
) -> None:
    async with http_endpoint(lambda body: response) as endpoint:
        failure = await failure_of(endpoint)
    assert reason in str(failure)
    assert (failure.excused_s, failure.retry_after_s, failure.is_busy) == (excused_s, retry_after_s, excused_s > 0)


async def test_an_answer_that_drips_ends_with_the_time_for_the_call() -> None:
    async def drip() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=drip()))
    endpoint = HttpEndpoint("http://endpoint.example/", BATCH, 0.01, transport)
    assert "in time" in str(await failure_of(endpoint))
    await endpoint.close()


async def test_no_connection_is_told_from_no_answer_however_short_the_time_for_a_call_is() -> None:
    """The time for a connection is over before that of the call, so an endpoint that is away costs no tries."""
    limits: list[float] = []

    async def refuse(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"]["connect"])
        raise httpx.ConnectTimeout("no connection")

    for timeout_s in (1.0, 5.0, 60.0):
        endpoint = HttpEndpoint("http://endpoint.example/", BATCH, timeout_s, httpx.MockTransport(refuse))
        with pytest.raises(Unreachable):
            await endpoint.call([b"1"])
        await endpoint.close()
    assert limits == [0.5, 2.5, 5.0]


async def test_an_output_that_is_not_utf_8_fails_its_item() -> None:
    text = b'{"results":[{"output":"\xff"},{"output":"\xc3\xa9"},{"output":3},{"output":4}]}'
    async with http_endpoint(lambda body: httpx.Response(200, content=text)) as endpoint:
        bad, good = await endpoint.call([b"1", b"2"])
    assert "not JSON" in bad.error
    assert good == ItemResult('"é"'.encode())


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (httpx.ConnectError("refused"), Unreachable, "endpoint.example"),
        (httpx.ReadTimeout("slow"), CallFailed, "in time"),
        (httpx.RemoteProtocolError("half an answer"), CallFailed, "half an answer"),
    ],
)
async def test_http_connections_that_break(error: Exception, kind: type[Exception], reason: str) -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        raise error

    async with http_endpoint(answer) as endpoint:
        with pytest.raises(kind, match=reason) as caught:
            await endpoint.call([b"1"])
    assert "secret" not in f"{caught.value} {endpoint.name}"


@pytest.mark.parametrize("name", ["double", "double_later"])
async def test_a_function_gets_a_batch_and_its_items_fail_alone(name: str) -> None:
    endpoint = open_endpoint(f"{HERE}.{name}", BATCH, 30.0)
    results = await endpoint.call([b"1", b'"x"'])
    assert results == [ItemResult(b"2"), ItemResult(error="ValueError: 'x' is no number")]


def crash(items: list[Any]) -> Any:
    raise RuntimeError("out of order")


async def wait(items: list[Any]) -> Any:
    await asyncio.Event().wait()


async def cancel_itself(items: list[Any]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (crash, "RuntimeError: out of order"),
        (lambda items: None, "NoneType, not a list"),
        (lambda items: items[:1], "1 results for a batch of 4"),
        (wait, "in time"),
        (cancel_itself, "CancelledError"),
    ],
)
async def test_functions_that_fail_the_call(function: Callable[[list[Any]], Any], reason: str) -> None:
    endpoint = function_endpoint(function, timeout_s=0.01 if function is wait else 30.0)
    assert reason in str(await failure_of(endpoint))
    await endpoint.close()


class Untellable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nor this")


class NamesItsThread(Exception):
    def __str__(self) -> str:
        return threading.current_thread().name


@pytest.mark.parametrize("is_async", [False, True])
async def test_outputs_are_read_in_the_thread_of_the_function(is_async: bool) -> None:
    """Large ones take long, and the worker's event loop must send heartbeats meanwhile."""
    endpoint = function_endpoint(lambda items: [NamesItsThread()] * BATCH, as_async=is_async)
    assert await endpoint.call([b"1"]) == [ItemResult(error="NamesItsThread: endpoint")]
    await endpoint.close()


@pytest.mark.parametrize("fails_call", [False, True])
async def test_reasons_can_be_stored_whatever_is_in_them(fails_call: bool) -> None:
    """Names of files that are not UTF-8 have such characters."""
    error = OSError("no file b\udcffd")

    def run(items: list[Any]) -> list[Any]:
        if fails_call:
            raise error
        return [error] * BATCH

    endpoint = function_endpoint(run)
    reason = str(await failure_of(endpoint)) if fails_call else (await endpoint.call([b"1"]))[0].error
    assert "OSError: no file b\\udcffd" in reason
    assert reason.encode()


ERRORS = (
    TimeoutError,
    StopIteration,
    StopAsyncIteration,
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
    Untellable,
)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_whatever_a_function_raises_fails_the_call_alone(error: type[BaseException], is_async: bool) -> None:
    fails = True

    def run(items: list[Any]) -> list[Any]:
        if fails:
            raise error
        return items

    endpoint = function_endpoint(run, as_async=is_async)
    assert "The function raised" in str(await failure_of(endpoint))
    fails = False
    assert await endpoint.call([b"1"]) == [ItemResult(b"1")]
    await endpoint.close()


async def test_an_async_function_that_blocks_does_not_block_the_worker() -> None:
    gate = threading.Event()

    async def block(items: list[Any]) -> list[Any]:
        assert gate.wait(30)
        return items

    endpoint = function_endpoint(block)
    calling = asyncio.create_task(endpoint.call([b"1"]))
    await asyncio.sleep(0)  # the call has begun, and this loop still runs
    gate.set()
    assert await calling == [ItemResult(b"1")]
    await endpoint.close()


async def test_a_call_that_is_cancelled_when_its_function_returns_is_cancelled() -> None:
    """Otherwise the loop that made the call would go on although it was told to end."""
    ended: Future[list[ItemResult]] = Future()
    endpoint = function_endpoint(double)
    endpoint._begin = lambda items: ended  # type: ignore[method-assign]
    calling = asyncio.create_task(endpoint.call([b"1"]))
    await asyncio.sleep(0)
    ended.set_result([ItemResult(b"2")])
    asyncio.get_running_loop().call_soon(calling.cancel)  # after the result has come, before the call goes on
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_calls_of_an_async_function_share_an_event_loop() -> None:
    """So a client that the function has opened in one call serves the next ones."""
    loops = []

    async def run(items: list[Any]) -> list[Any]:
        loops.append(asyncio.get_running_loop())
        return items

    endpoint = function_endpoint(run)
    for _ in range(2):
        await endpoint.call([b"1"])
    await endpoint.close()
    assert loops[0] is loops[1] is not asyncio.get_running_loop()


@pytest.mark.parametrize("output", [object(), math.nan, {"score": [1.0, -math.inf]}, (None, math.nan), Untellable])
async def test_an_output_that_is_no_json_fails_its_item(output: Any) -> None:
    results = await function_endpoint(lambda items: [output, None, 1, 1]).call([b"1", b"2", b"3"])
    assert "not JSON" in results[0].error
    assert results[1:] == [ItemResult(b"null"), ItemResult(b"1")]


async def test_a_function_that_never_returns_hangs() -> None:
    gate = threading.Event()
    try:
        with pytest.raises(EndpointHangs, match="python:test"):
            await function_endpoint(lambda items: gate.wait(), timeout_s=0.01).call([b"1"])
    finally:
        gate.set()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("", "neither"),
        ("ftp://example.com", "neither"),
        ("example.com/run", "neither"),
        ("http://[example/run", "neither"),
        ("http://example.com:port/run", "neither"),
        ("http://example.com:99999/run", "neither"),
        ("python:function", "names no function"),
        ("python:no_such_module.f", "cannot be loaded"),
        (f"{HERE}.no_such_function", "cannot be loaded"),
        (f"{HERE}.not_a_function", "is not a function"),
    ],
)
def test_endpoints_that_cannot_be_opened(spec: str, reason: str) -> None:
    with pytest.raises(EngineStartError, match=reason):
        open_endpoint(spec, BATCH, 1.0)


@pytest.mark.parametrize(("text", "reason"), [("def run(:", "invalid syntax"), ("raise SystemExit('usage')", "usage")])
def test_a_module_that_can_never_be_loaded(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ended with another error would be started again and again."""
    (tmp_path / "never_loaded.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineStartError, match=f"cannot be loaded: .*{reason}"):
        open_endpoint("python:never_loaded.run", BATCH, 1.0)
