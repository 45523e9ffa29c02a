"""Virtual time: the clock jumps, the order of events stays, and waiting for the real world is an error."""

import asyncio

import pytest

from scheduler.virtual_time import EPOCH_MS, VirtualClock, VirtualDeadlock, run_virtual


def test_an_hour_passes_at_once() -> None:
    async def main() -> tuple[float, int]:
        clock = VirtualClock()
        await clock.sleep(3600)
        return clock.now(), clock.wall_ms()

    assert run_virtual(main()) == (3600.0, EPOCH_MS + 3_600_000)


def test_sleepers_wake_in_time_order_and_ties_in_the_order_of_going_to_sleep() -> None:
    async def main() -> list[str]:
        clock, woken = VirtualClock(), []

        async def sleeper(name: str, seconds: float) -> None:
            await clock.sleep(seconds)
            woken.append(f"{name}@{clock.now():g}")

        await asyncio.gather(sleeper("c", 2), sleeper("a", 1), sleeper("b", 1), sleeper("d", 1.5))
        return woken

    assert run_virtual(main()) == ["a@1", "b@1", "d@1.5", "c@2"]


def test_timeouts_are_virtual_too() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await VirtualClock().sleep(1000)
        return VirtualClock().now()

    assert run_virtual(main()) == 10.0


def test_waiting_for_what_cannot_happen_raises_and_does_not_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlock):
        run_virtual(main())
