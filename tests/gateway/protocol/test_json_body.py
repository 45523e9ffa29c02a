"""Short bodies are parsed on the event loop, long ones in a thread."""

import threading
from typing import Any

import pytest
from fastapi import Request
from starlette.types import Message

from gateway.protocol.json_body import INLINE_SIZE, is_large, read_object


def request_with(data: bytes) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.parametrize(("num_chars", "on_loop"), [(10, True), (INLINE_SIZE, False)])
async def test_long_bodies_are_read_off_the_loop(num_chars: int, on_loop: bool) -> None:
    def interpret(body: dict[str, Any]) -> tuple[int, threading.Thread]:
        return len(body["a"]), threading.current_thread()

    length, thread = await read_object(request_with(b'{"a": "%s"}' % (b"x" * num_chars)), interpret)
    assert length == num_chars
    assert (thread is threading.main_thread()) == on_loop


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
