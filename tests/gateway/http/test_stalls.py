"""What one client sends does not hold up the event loop, on which the streams of all others are."""

import asyncio

from gateway.requests.prepare.placement import Placement
from scheduler.clock import SystemClock
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL
from tests.waiting import until


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
