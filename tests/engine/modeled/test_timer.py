"""Waits whose end is moved, in virtual time."""

import asyncio

import pytest

from engine.modeled.timer import LoopTimer
from scheduler.virtual_time import run_virtual


def test_a_wait_ends_at_the_time_that_was_set_last() -> None:
    """Or at once, if that time is over. Between two waits, a move does nothing."""

    async def scenario() -> list[float]:
        timer, ends = LoopTimer(), []
        for moves in ([], [2.0], [7.0], [7.0, 3.0], [0.5]):
            started = timer.now()
            timer.move(started + 100)
            waiting = asyncio.create_task(timer.wait_until(started + 5))
            await asyncio.sleep(1)
            for end_s in moves:
                timer.move(started + end_s)
            await waiting
            ends.append(timer.now() - started)
        return ends

    assert run_virtual(scenario()) == pytest.approx([5, 2, 7, 3, 1], abs=1e-4)


def test_a_second_wait_at_a_time_is_refused() -> None:
    async def scenario() -> None:
        timer = LoopTimer()
        waiting = asyncio.create_task(timer.wait_until(5))
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="going on already"):
            await timer.wait_until(2)
        await waiting

    run_virtual(scenario())
