"""Waits whose end is moved, in virtual time."""

import asyncio

import pytest

from engine.modeled.timer import LoopTimer
from scheduler.virtual_time import run_virtual


def test_a_wait_ends_at_the_time_that_was_set_last() -> None:
    async def scenario() -> list[float]:
        timer, ends = LoopTimer(), []
        for moves in ([], [2.0], [7.0], [7.0, 3.0]):
            started = timer.now()
            waiting = asyncio.create_task(timer.wait_until(started + 5))
            await asyncio.sleep(1)
            for end_s in moves:
                timer.move(started + end_s)
            await waiting
            ends.append(timer.now() - started)
        return ends

    assert run_virtual(scenario()) == pytest.approx([5, 2, 7, 3])


def test_an_end_in_the_past_ends_the_wait_at_once() -> None:
    async def scenario() -> float:
        timer = LoopTimer()
        waiting = asyncio.create_task(timer.wait_until(9))
        await asyncio.sleep(4)
        timer.move(1)
        await waiting
        return timer.now()

    assert run_virtual(scenario()) == pytest.approx(4, abs=1e-4)


def test_moving_without_a_wait_does_nothing() -> None:
    async def scenario() -> float:
        timer = LoopTimer()
        timer.move(100)
        await timer.wait_until(2)
        timer.move(100)
        await timer.wait_until(3)
        return timer.now()

    assert run_virtual(scenario()) == pytest.approx(3)


def test_a_cancelled_wait_can_be_repeated() -> None:
    async def scenario() -> float:
        timer = LoopTimer()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(timer.wait_until(5), 1)
        await timer.wait_until(5)
        return timer.now()

    assert run_virtual(scenario()) == pytest.approx(5)


def test_a_second_wait_at_a_time_is_refused() -> None:
    async def scenario() -> None:
        timer = LoopTimer()
        waiting = asyncio.create_task(timer.wait_until(5))
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="going on already"):
            await timer.wait_until(2)
        await waiting

    run_virtual(scenario())
