"""What one client sends does not hold up the event loop, on which the streams of all others are."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from gateway.requests.prepare.placement import Placement
from scheduler.clock import SystemClock
from tests.gateway.stand import MODEL, running_stand
from tests.waiting import until

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


class IterationClock(SystemClock):
    """A clock whose wall time goes on by a millisecond in each iteration of the event loop."""

    def __init__(self) -> None:
        self.iteration = 0
        self._tick()

    def _tick(self) -> None:
        self.iteration += 1
        self._next = asyncio.get_running_loop().call_soon(self._tick)

    def wall_ms(self) -> int:
        return self.iteration

    def stop(self) -> None:
        self._next.cancel()


async def test_the_loop_does_what_is_due_between_two_lines_that_begin_or_end_together() -> None:
    clock, ended = IterationClock(), list[int]()
    async with running_stand(clock=clock) as stand:
        stand.worker.gate.clear()
        service, tier = stand.gateway.completions, stand.gateway.client.tiers["batch"]

        async def run(i: int) -> int:
            body = {"model": MODEL, "prompt": "x"}
            status, _ = await service.complete("/v1/completions", body, Placement(tier, "flex", f"req_{i}"))
            ended.append(clock.iteration)
            return status

        tasks = [asyncio.create_task(run(i)) for i in range(20)]
        await until(lambda: len(stand.worker.served) == 20)
        stand.worker.gate.set()
        assert await asyncio.gather(*tasks) == [200] * 20
        clock.stop()
    assert len({request.arrival_ms for request in stand.worker.served}) == len(set(ended)) == 20
