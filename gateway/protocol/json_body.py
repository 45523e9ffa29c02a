"""Parse a request's body as one JSON object: strict UTF-8, no NaN, no lone surrogates, bounded depth.

Does not know which fields the object must have: the schemas define them. Large bodies are parsed in a thread, so that
the event loop can go on serving streams.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.protocol.errors import invalid_json, invalid_request
from gateway.protocol.validation import first_fault

MAX_DEPTH = 64
# A body larger than this is parsed and validated in a thread. The unit is bytes before parsing; after parsing, it is
# the sum of characters and items.
INLINE_SIZE = 256 * 2**10


class Body(BaseModel):
    """The base class of the schemas. It checks the types of known fields strictly, and ignores unknown fields."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


async def read_object(request: Request, interpret: Callable[[dict[str, Any]], T]) -> T:
    """Parse the request's body and return `interpret(body)`.

    Raises `ApiError` 400 if the body is not one JSON object.
    """
    data = await request.body()
    if len(data) <= INLINE_SIZE:
        return interpret(parse_json_object(data))
    return await asyncio.to_thread(lambda: interpret(parse_json_object(data)))


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Return `data` as a dict. Raises `ApiError` 400 if `data` is not one JSON object of at most `MAX_DEPTH` levels."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid_json() from None
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


def is_large(value: dict[str, Any]) -> bool:
    """Whether the characters and items of `value` add up to more than `INLINE_SIZE`. Counting stops at this limit."""
    size, rest = 0, list[Any]([value])
    while rest:
        node = rest.pop()
        if isinstance(node, str | dict | list):
            size += len(node)
            if size > INLINE_SIZE:
                return True
            if not isinstance(node, str):
                rest.extend(node.values() if isinstance(node, dict) else node)
    return False


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
