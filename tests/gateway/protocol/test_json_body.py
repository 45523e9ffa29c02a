"""Short bodies are parsed on the event loop, long ones in another process, and never too many at once."""

import asyncio
import gzip
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio.to_process
import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from gateway.protocol import json_body
from gateway.protocol.bodies.schemas import ChatCompletionRequest, parse_generation
from gateway.protocol.errors import ApiError, invalid_value
from gateway.protocol.json_body import (
    INLINE_CONTAINERS,
    INLINE_SIZE,
    MAX_CONTAINERS,
    MAX_VALUES,
    BodyReader,
    _outside_strings,
    is_large,
    parse_json_object,
    read_object,
)
from tests.waiting import until

LONG = b'{"a": "%s"}' % (b"x" * INLINE_SIZE)
MANY = b'{"a": [%s[]]}' % (b"[]," * INLINE_CONTAINERS)


def request_with(*chunks: bytes, reader: BodyReader | None = None, **headers: str) -> Request:
    rest = [*chunks]

    async def receive() -> Message:
        body = rest.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(rest)}

    app = SimpleNamespace(state=SimpleNamespace(body_reader=reader or BodyReader(2**26)))
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw, "app": app}, receive)


def where(body: dict[str, Any]) -> tuple[int, int, int]:
    return len(body["a"]), os.getpid(), os.nice(0)


def refuse(body: dict[str, Any]) -> None:
    raise invalid_value("a", "no")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long bodies are parsed here, in a later round of the loop: a process takes most of a second to start."""

    async def run_sync(work: Any, *args: Any, cancellable: bool, limiter: anyio.CapacityLimiter) -> Any:
        async with limiter:
            await asyncio.sleep(0)
            return work(*args)

    monkeypatch.setattr(anyio.to_process, "run_sync", run_sync)
    monkeypatch.setattr(json_body, "PARSE_NICENESS", 0)


def die(body: dict[str, Any]) -> None:
    os._exit(1)


async def test_short_bodies_are_read_here_and_long_ones_in_a_process_that_may_die() -> None:
    assert await read_object(request_with(b'{"a": ', b'"x"}'), where) == (1, os.getpid(), os.nice(0))
    length, process, niceness = await read_object(request_with(LONG), where)
    assert length == INLINE_SIZE
    assert process != os.getpid()
    assert niceness > os.nice(0)
    assert (await read_object(request_with(LONG), where))[2] == niceness  # the priority does not fall every time
    length, process, _ = await read_object(request_with(MANY), where)
    assert length == INLINE_CONTAINERS + 1 and process != os.getpid()
    message = {"role": "user", "content": "x" * INLINE_SIZE}
    data = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % message["content"].encode()
    parsed = await read_object(request_with(data), partial(parse_generation, ChatCompletionRequest))
    assert parsed == parse_generation(ChatCompletionRequest, {"model": "m", "messages": [message]})
    with pytest.raises(ApiError) as error:
        await read_object(request_with(LONG), refuse)
    assert (error.value.status, error.value.param, error.value.code) == (400, "a", "invalid_value")
    with pytest.raises(ApiError) as error:
        await read_object(request_with(LONG), die)
    assert error.value.status == 500
    assert (await read_object(request_with(LONG), where))[0] == INLINE_SIZE


async def test_a_compressed_body_is_refused_as_such() -> None:
    with pytest.raises(ApiError, match="Content-Encoding 'gzip'") as error:
        await read_object(request_with(gzip.compress(b'{"a": ""}'), content_encoding="gzip"), where)
    assert error.value.status == 415
    assert (await read_object(request_with(b'{"a": ""}', content_encoding="Identity"), where))[0] == 0


@pytest.mark.parametrize("text", [rb"\ud83d", rb"\ud83d end", rb"\uD83D\n", rb"a\udd00", rb"\ud83d\ud83d\ude00"])
def test_a_half_of_a_surrogate_pair_is_named(text: bytes) -> None:
    with pytest.raises(ApiError, match="half of a surrogate pair"):
        parse_json_object(b'{"a": "%s"}' % text)


@pytest.mark.parametrize("data", [rb'{"a": "\ud83d\ude00"', b'{"a": "\xed\xa0\x80"}', b"{", b""])
def test_other_faults_of_the_json_are_no_surrogates(data: bytes) -> None:
    with pytest.raises(ApiError, match="is not valid JSON in UTF-8"):
        parse_json_object(data)


async def test_a_client_holds_no_more_than_twice_what_it_leaves() -> None:
    reader = BodyReader(1000)

    class Slow(Request):
        """A body of which 600 bytes have come."""

        async def stream(self) -> AsyncIterator[bytes]:
            yield b'{"a": "' + b"x" * 593
            await asyncio.Event().wait()

    def of(key: str, *chunks: bytes) -> Request:
        request = request_with(*chunks, reader=reader)
        request.state.key_name = key
        return request

    first = of("greedy")
    reading = asyncio.create_task(reader.read(Slow(first.scope, first.receive), where))
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as error:
        await read_object(of("greedy", b'{"a": "%s"}' % (b"x" * 100)), where)
    assert error.value.status == 503
    assert (await read_object(of("other", b'{"a": "%s"}' % (b"x" * 200)), where))[0] == 200
    reading.cancel()
    await asyncio.wait([reading])
    assert (await read_object(of("greedy", b'{"a": "%s"}' % (b"x" * 600)), where))[0] == 600


async def test_a_slow_body_gives_way_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "CROWDED_BYTES_PER_S", 1e12)
    reader, more, num_came = BodyReader(1000), asyncio.Event(), 0

    class Slow(Request):
        async def stream(self) -> AsyncIterator[bytes]:
            nonlocal num_came
            yield b'{"a": "' + b"x" * 300
            num_came += 1
            await more.wait()
            yield b"x"
            yield b'"}'

    def of(key: str) -> Request:
        request = request_with()
        request.state.key_name = key
        return Slow(request.scope, request.receive)

    reading = [asyncio.create_task(reader.read(of(key), where)) for key in ("one", "two")]
    await until(lambda: num_came == 2)
    monkeypatch.setattr(json_body, "SLOW_AFTER_S", 0.0)
    more.set()
    refused, read = await asyncio.gather(*reading, return_exceptions=True)
    assert isinstance(refused, ApiError) and refused.status == 408
    assert isinstance(read, tuple) and read[0] == 301, "there is room again"


async def test_a_body_counts_until_it_is_released() -> None:
    reader = BodyReader(1000)
    body = b'{"a": "%s"}' % (b"x" * 600)
    async with reader.hold(request_with(body), where) as (length, *_):
        assert length == 600
        with pytest.raises(ApiError) as error:
            await reader.read(request_with(body), where)
        assert error.value.status == 503
    assert (await reader.read(request_with(body), where))[0] == 600


@pytest.mark.usefixtures("in_this_process")
async def test_other_work_in_processes_does_not_keep_bodies_waiting() -> None:
    other = anyio.to_process.current_default_process_limiter()
    for n in range(int(other.total_tokens)):
        await other.acquire_on_behalf_of(n)
    try:
        assert (await asyncio.wait_for(read_object(request_with(LONG), where), 30))[0] == INLINE_SIZE
    finally:
        for n in range(int(other.total_tokens)):
            other.release_on_behalf_of(n)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": [%s 1]}' % (b"1," * (MAX_VALUES + 1)),
        b'{"a": [%s 1]}' % (b"{}," * (MAX_CONTAINERS + 1)),
        b'{"a": %s}' % (b"[" * (MAX_CONTAINERS + 1)),
        b'{"a": "%s' % (b'"\\' * MAX_VALUES + b"," * MAX_VALUES),  # a string without an end
    ],
    ids=["numbers", "objects", "arrays", "malformed"],
)
def test_too_many_values_are_refused_before_they_take_memory(data: bytes) -> None:
    with pytest.raises(ApiError) as error:
        parse_json_object(data)
    assert error.value.status == 400


TEXTS = st.text(alphabet='ab,"\\[{}]:\né', max_size=6)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(TEXTS, values, max_size=4),
    max_leaves=20,
)


def count_marks(value: Any) -> int:
    """The commas and opening brackets that JSON needs for `value`."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(count_marks(item) for item in inner)


@given(VALUES, st.booleans())
def test_only_marks_outside_strings_are_counted(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert len(_outside_strings(text)) == count_marks(value)


@pytest.mark.parametrize(
    ("value", "large"),
    [
        ({}, False),
        ({"a": ["x" * 1000] * 100, "b": 5, "c": None}, False),
        ({"a": "x" * INLINE_SIZE}, True),
        ({"a": [1] * INLINE_SIZE}, True),
        ({"a": {"b": [["x" * 1000] * 10] * 100}}, True),
    ],
)
def test_the_size_of_a_parsed_body(value: dict[str, Any], large: bool) -> None:
    assert is_large(value) == large
