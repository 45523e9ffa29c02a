"""Waits whose end moves, in virtual time."""

import asyncio

import pytest

from engine.modeled.timer import LoopTimer
from scheduler.virtual_time import run_virtual


def test_a_wait_ends_when_it_was_said_and_when_it_was_said_last() -> None:
    async def story() -> list[float]:
        timer, ends = LoopTimer(), []
        for moves in ([], [2.0], [7.0], [7.0, 3.0]):
            started = timer.now()
            waiting = asyncio.create_task(timer.wait_until(started + 5))
            await asyncio.sleep(1)
            for behind in moves:
                timer.move(started + behind)
            await waiting
            ends.append(timer.now() - started)
        return ends

    assert run_virtual(story()) == pytest.approx([5, 2, 7, 3])


def test_an_end_in_the_past_is_now() -> None:
    async def story() -> float:
        timer = LoopTimer()
        waiting = asyncio.create_task(timer.wait_until(9))
        await asyncio.sleep(4)
        timer.move(1)
        await waiting
        return timer.now()

    assert run_virtual(story()) == pytest.approx(4, abs=1e-4)


def test_moving_a_wait_that_nobody_waits_does_nothing() -> None:
    async def story() -> float:
        timer = LoopTimer()
        timer.move(100)
        await timer.wait_until(2)
        timer.move(100)
        await timer.wait_until(3)
        return timer.now()

    assert run_virtual(story()) == pytest.approx(3)


def test_a_cancelled_wait_may_be_taken_up_again() -> None:
    async def story() -> float:
        timer = LoopTimer()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(timer.wait_until(5), 1)
        await timer.wait_until(5)
        return timer.now()

    assert run_virtual(story()) == pytest.approx(5)


def test_one_waits_at_a_time() -> None:
    async def story() -> None:
        timer = LoopTimer()
        waiting = asyncio.create_task(timer.wait_until(5))
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="waits already"):
            await timer.wait_until(2)
        await waiting

    run_virtual(story())
