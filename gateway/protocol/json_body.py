"""Parse a request's body as one JSON object: strict UTF-8, no NaN, no lone surrogates, bounded depth.

Does not know which fields the object must have: the schemas define them. Large bodies are parsed and checked in another
process, one at a time: parsers hold Python's global lock, so a thread would stop all streams.
"""

import asyncio
import io
import os
import pickle
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_process
import msgspec
from anyio import BrokenWorkerProcess
from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.fairness import FairLock, HeldBytes, Turns
from gateway.protocol.bodies.validation import first_fault
from gateway.protocol.errors import (
    compressed_body,
    internal_error,
    invalid_json,
    invalid_request,
    slow_body,
    too_many_bodies,
)

MAX_DEPTH = 64
# A body larger than this is parsed and validated in another process. The unit is bytes before parsing; after parsing,
# it is the sum of characters and items.
INLINE_SIZE = 256 * 2**10
# Likewise, a body with more arrays and objects: so many take 4 ms, and 256 KiB of them 100 ms.
INLINE_CONTAINERS = 2**13
# Limits of a larger body. An object of Python takes up to 100 times the memory of its bytes in JSON. A million values
# is what `prompt` may have as token ids.
MAX_VALUES = 2**20 + 2**16
MAX_CONTAINERS = 2**17  # arrays and objects
VALUE_MARKS = b'",[{'
NO_MARKS = bytes(set(range(256)) - set(VALUE_MARKS))
HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL
)
STRING = re.compile(rb'"[^"]*"?')  # the end is optional, so that the search is linear
PARSE_TIMEOUT_S = 30.0  # seconds for the other process; it starts within two, and takes under a second for 16 MB
MAX_BODIES = 16  # of the largest size, which may be in memory together
# While bodies hold over half of their memory, one that has come for `SLOW_AFTER_S` seconds must have come at this rate.
SLOW_AFTER_S, CROWDED_BYTES_PER_S = 10.0, 2**18
PARSE_NICENESS = 10  # priority of the other process: streams and the engine on the same cores come first


class Body(BaseModel):
    """The base class of the schemas. It checks the types of known fields strictly, and ignores unknown fields."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class BodyReader:
    """Reads the bodies of requests. All that are being received, parsed or held may have `max_total_bytes` together.

    A client is a key, or an address while access is open. Each holds its share, and large bodies are parsed one at a
    time, a client's after another client's.
    """

    def __init__(self, max_total_bytes: int) -> None:
        self._held = HeldBytes(max_total_bytes)
        self._turns = Turns()
        self._lock = FairLock()
        self._process = anyio.CapacityLimiter(1)  # not anyio's default, which work of other kinds may have taken

    @asynccontextmanager
    async def hold(
        self,
        request: Request,
        interpret: Callable[[dict[str, Any]], T],
        on_bytes: Callable[[bytes], object] | None = None,
    ) -> AsyncIterator[T]:
        """Parse the request's body and yield `interpret(body)`. A body that takes long is parsed when it has its turn.

        The body counts until the block ends. `on_bytes` gets its bytes as they come. They are not kept, unlike those of
        `request.body()`. Raises `ApiError` 400 if the body is not one JSON object, 415 if it is compressed, 503 if
        there are too many bodies, and 408 if it comes slowly meanwhile.
        """
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise compressed_body(encoding)
        data, held, client = bytearray(), 0, _client(request)
        began_s = asyncio.get_running_loop().time()
        try:
            async for chunk in request.stream():
                held += len(chunk)
                self._held.add(client, len(chunk))
                if self._held.has_too_many(client):
                    raise too_many_bodies()
                seconds = asyncio.get_running_loop().time() - began_s
                if self._held.is_crowded and _is_slow(held, seconds):
                    raise slow_body()
                data += chunk
                if on_bytes is not None:
                    on_bytes(chunk)
            result = await self._interpreted(data, interpret, client)
            del data  # the result takes its place
            yield result
        finally:
            self._held.add(client, -held)

    async def read(
        self,
        request: Request,
        interpret: Callable[[dict[str, Any]], T],
        on_bytes: Callable[[bytes], object] | None = None,
    ) -> T:
        """Return what `hold` yields. The body counts no longer: what is made of it must be small, or counted."""
        async with self.hold(request, interpret, on_bytes) as result:
            return result

    async def _interpreted(self, data: bytearray, interpret: Callable[[dict[str, Any]], T], client: str) -> T:
        if is_long(data):
            async with self._turns.of(client):
                return await self._read_in_process(data, interpret)
        await self._lock.acquire(client)
        return interpret(parse_json_object(data))

    async def _read_in_process(self, data: bytearray, interpret: Callable[[dict[str, Any]], T]) -> T:
        try:
            async with asyncio.timeout(PARSE_TIMEOUT_S):
                pickled = await anyio.to_process.run_sync(
                    _read_here, data, interpret, cancellable=True, limiter=self._process
                )
                result: T = await asyncio.to_thread(unpickled, pickled)
                return result
        except TimeoutError:
            raise too_many_bodies() from None
        except BrokenWorkerProcess:
            raise internal_error("The server could not read this body.") from None


def _is_slow(num_bytes: int, seconds: float) -> bool:
    return seconds > SLOW_AFTER_S and num_bytes < CROWDED_BYTES_PER_S * seconds


def _client(request: Request) -> str:
    """Return whose body it is: the name of the key, or the address of a client without one."""
    name: str | None = getattr(request.state, "key_name", None)
    return name or (request.client.host if request.client is not None else "")


def hold_object(
    request: Request, interpret: Callable[[dict[str, Any]], T], on_bytes: Callable[[bytes], object] | None = None
) -> AbstractAsyncContextManager[T]:
    """Parse the request's body and yield `interpret(body)`, as `BodyReader.hold` does.

    `interpret` and its result must be picklable, because both go to another process and back if the body is large.
    """
    reader: BodyReader = request.app.state.body_reader
    return reader.hold(request, interpret, on_bytes)


async def read_object(
    request: Request, interpret: Callable[[dict[str, Any]], T], on_bytes: Callable[[bytes], object] | None = None
) -> T:
    """Return what `hold_object` yields, as `BodyReader.read` does."""
    async with hold_object(request, interpret, on_bytes) as result:
        return result


class _Frames:
    """A file from which pickle reads frame by frame. Because this is Python, other threads can run in between."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def readline(self) -> bytes:
        return self._file.readline()


def unpickled(data: bytes) -> Any:
    """Return `pickle.loads(data)`, but do not keep other threads waiting: a million numbers take 40 ms."""
    return pickle.load(_Frames(data))


def _read_here(data: bytearray, interpret: Callable[[dict[str, Any]], T]) -> bytes:
    """Return the pickled result. anyio would unpickle it on the event loop, which takes long for many parts."""
    os.nice(max(0, PARSE_NICENESS - os.nice(0)))
    return pickle.dumps(interpret(parse_json_object(data)), pickle.HIGHEST_PROTOCOL)


def parse_json_object(data: bytes | bytearray) -> dict[str, Any]:
    """Return `data` as a dict.

    Raises `ApiError` 400 if `data` is not one JSON object of at most `MAX_DEPTH` levels, or has too many values.
    """
    if len(data) > INLINE_SIZE and has_too_many_values(data, MAX_VALUES, MAX_CONTAINERS):
        message = f"The body has more than {MAX_VALUES} values, or more than {MAX_CONTAINERS} arrays and objects."
        raise invalid_request(message, code="invalid_value")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid_json(has_half_pair=HALF_PAIR.search(data) is not None) from None
    if not isinstance(value, dict):
        raise invalid_request("The body must be a JSON object.", code="invalid_type")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        message = f"The body is nested more than {MAX_DEPTH} levels deep."
        raise invalid_request(message, code="invalid_value")
    return value


def parse(kind: type[M], body: dict[str, Any]) -> M:
    """Return `body` as an instance of the schema `kind`. Raises `ApiError` 400 if `body` does not match the schema.

    The error names the wrong parameter, but does not repeat its value.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        fault = first_fault(error.errors(include_url=False, include_input=False))
        raise invalid_request(fault.message, fault.param, fault.code) from None


def is_long(data: bytes | bytearray) -> bool:
    """Whether the JSON in `data` may take long to parse: it has many bytes, or many arrays and objects."""
    return len(data) > INLINE_SIZE or data.count(b"[") + data.count(b"{") > INLINE_CONTAINERS


def is_large(value: Any, limit: int = INLINE_SIZE) -> bool:
    """Whether the characters and items of `value` add up to more than `limit`. Counting stops at this limit."""
    size, rest = 0, list[Any]([value])
    while rest:
        node = rest.pop()
        if isinstance(node, str | dict | list):
            size += len(node)
            if size > limit:
                return True
            if not isinstance(node, str):
                rest.extend(node.values() if isinstance(node, dict) else node)
    return False


def has_more_values(value: Any, limit: int) -> bool:
    """Whether `value` has more than `limit` items and fields, in all its levels. Counting stops at this limit."""
    num_values, rest = 0, list[Any]([value])
    while rest:
        node = rest.pop()
        if isinstance(node, BaseModel):
            node = node.__dict__
        if isinstance(node, dict | list):
            num_values += len(node)
            if num_values > limit:
                return True
            rest.extend(node.values() if isinstance(node, dict) else node)
    return False


def has_too_many_values(data: bytes | bytearray, max_values: int, max_containers: int) -> bool:
    """Whether the JSON in `data` has more values, or arrays and objects. They are counted before they take memory."""

    def are_too_many(marks: bytes | bytearray) -> bool:
        num_containers = marks.count(b"[") + marks.count(b"{")
        return num_containers > max_containers or num_containers + marks.count(b",") > max_values

    return are_too_many(data) and are_too_many(_outside_strings(data))  # most texts pass the first, faster count


def _outside_strings(data: bytes | bytearray) -> bytes | bytearray:
    """Return the commas and opening brackets of `data` that are not in strings.

    Two quotes in a row can go before the search for strings: what comes after them is in a string or not as before.
    """
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    return STRING.sub(b"", plain.translate(None, NO_MARKS).replace(b'""', b""))


def _deeper_than(value: dict[str, Any], limit: int) -> bool:
    """Whether `value` has more than `limit` levels of nesting.

    The function goes through `value` level by level, because recursion would fail on deeply nested values.
    """
    level: list[Any] = [value]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: Any) -> list[Any]:
    inner = node.values() if isinstance(node, dict) else node
    return [child for child in inner if isinstance(child, dict | list)]
