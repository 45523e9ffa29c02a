"""A request's body as one JSON object: strict UTF-8, no NaN, no lone surrogates, bounded depth.

Knows bytes, JSON and how pydantic complains; what the object must hold is the schemas' matter.
"""

from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from gateway.errors import invalid_json, invalid_request
from gateway.validation import first_fault

MAX_DEPTH = 64

M = TypeVar("M", bound=BaseModel)


async def read_json_object(request: Request) -> dict[str, Any]:
    """Raises `ApiError` 400 for anything that is not one JSON object."""
    return parse_json_object(await request.body())


def parse_json_object(data: bytes) -> dict[str, Any]:
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
    """`body` as a `kind`. Raises `ApiError` 400 that names the parameter at fault, and never repeats its value."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        fault = first_fault(error.errors(include_url=False, include_input=False, include_context=False))
        raise invalid_request(fault.message, fault.param, fault.code) from None


def _deeper_than(value: dict[str, Any], limit: int) -> bool:
    """Level by level, without recursion: what is too deep for this would break whoever recurses later."""
    level: list[Any] = [value]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: Any) -> list[Any]:
    inner = node.values() if isinstance(node, dict) else node
    return [child for child in inner if isinstance(child, dict | list)]
