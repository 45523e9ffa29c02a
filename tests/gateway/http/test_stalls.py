"""What one client sends does not hold up the event loop, on which the streams of all others are."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from tests.gateway.stand import running_stand

SIZE = 15 * 2**20
REQUEST = b'{"model": "nope", "messages": [{"role": "user", "content": "x"}], "x": [%s 1]}'
BODIES = {
    "objects": REQUEST % (b'{"a":1},' * (SIZE // 8)),
    "arrays": REQUEST % (b"[[]]," * (SIZE // 5)),
    "strings": REQUEST % (b'"ab",' * (SIZE // 5)),
}


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """The heap of a test run is large, so a collection would take longer than what is measured."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def decoding_s(body: bytes) -> float:
    """Return the CPU time that this process takes to decode `body`, as it once did while all streams waited."""
    before_s = time.process_time()
    msgspec.json.decode(body)
    return time.process_time() - before_s


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 2**16):
        yield body[start : start + 2**16]


@pytest.mark.parametrize("kind", BODIES)
async def test_a_large_body_does_not_hold_up_the_loop(kind: str, no_garbage_collection: None) -> None:
    longest_s, done = 0.0, False

    async def watch() -> None:
        nonlocal longest_s
        last_s = time.process_time()
        while not done:
            await asyncio.sleep(0.001)
            now_s = time.process_time()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s

    async with running_stand(max_body_bytes=2 * SIZE) as stand:
        await stand.http.post("/v1/chat/completions", content=pieces(BODIES["objects"][:400_000]))  # starts the process
        watching = asyncio.create_task(watch())
        response = await stand.http.post("/v1/chat/completions", content=pieces(BODIES[kind]))
        done = True
        await watching
    assert response.status_code in (400, 404)
    assert longest_s < decoding_s(BODIES[kind]) / 2
