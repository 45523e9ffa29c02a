"""How much the gateway computes for a request, as calls of Python functions: unlike times, these do not vary.

The bounds are 15 % above what was counted with Python 3.11; later versions make fewer calls. A change that exceeds one
makes every request, or every token, dearer: look for work that can go before a bound rises.
"""

import asyncio
import json
import selectors
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from starlette.types import Message, Scope
from structlog.testing import capture_logs

from scheduler.clock import SystemClock
from scheduler.queue.redis import RedisQueue
from scheduler.store import connection
from tests.gateway import scripted_worker
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL, token_ids
from tests.scheduler.builders import make_request
from tests.stores import Store

ROUNDS = 12  # the least of them counts: what the gateway does every second may fall into some
SHORT, LONG = "tide", "the tide rises and the tide falls, and it rises"
LOOP = (str(Path(asyncio.__file__).parent), selectors.__file__)  # uvloop does in C what these do


@dataclass
class Calls:
    """The calls of Python functions by the gateway: without those of the test, of its worker and of asyncio's loop."""

    num: int = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not self._is_of_test(frame):
            self.num += 1

    @staticmethod
    def _is_of_test(frame: FrameType) -> bool:
        if frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(LOOP):
            return True
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename == scripted_worker.__file__:
                return True
        return False


@contextmanager
def counted() -> Iterator[Calls]:
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


class Client:
    """One request as the server passes it to the app, and its answer."""

    def __init__(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        headers = {"host": "localhost:8000", "content-type": "application/json", "content-length": str(len(data))}
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 50_000),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        self._messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
        self.answer: list[Message] = []

    async def receive(self) -> Message:
        return self._messages.pop() if self._messages else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(self, message: Message) -> None:
        self.answer.append(message)


async def calls_of_a_request(stand: Stand, text: str, *, stream: bool) -> int:
    """Return the calls for a request that is answered with `text`, token by token."""
    stand.worker.script = scripted_worker.answer_with(text)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "stream": stream}
    found = []
    for _ in range(ROUNDS):
        client = Client(body)
        with capture_logs(), counted() as calls:
            await stand.app(client.scope, client.receive, client.send)
        assert client.answer[0]["status"] == 200
        assert (b"[DONE]" in b"".join(m.get("body", b"") for m in client.answer)) == stream
        found.append(calls.num)
    return min(found)


@pytest.mark.parametrize(("stream", "most", "most_of_token"), [(False, 843, 78), (True, 848, 94)])
async def test_a_request_and_a_token_make_few_calls(stream: bool, most: int, most_of_token: int) -> None:
    async with running_stand() as stand:
        short = await calls_of_a_request(stand, SHORT, stream=stream)
        long = await calls_of_a_request(stand, LONG, stream=stream)
    num_tokens = len(token_ids(SHORT))
    of_token = (long - short) / (len(token_ids(LONG)) - num_tokens)
    assert short - num_tokens * of_token <= most
    assert of_token <= most_of_token


async def test_a_put_into_the_store_makes_few_calls(valkey_server: Store) -> None:
    found = []
    async with connection.connect(valkey_server.url) as redis:
        queue = RedisQueue(redis, SystemClock())
        for number in range(ROUNDS):
            request = make_request(f"r{number}")
            with counted() as calls:
                assert await queue.put([request]) is None
            found.append(calls.num)
    assert min(found) <= 114
