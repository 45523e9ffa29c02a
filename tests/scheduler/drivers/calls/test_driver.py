"""The loop of a worker with a static endpoint, on a real store."""

import asyncio
import json
import math
import random
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from engine.static.interface import CallFailed, EndpointHangs, ItemResult, Unreachable
from scheduler.drivers.calls.settled import WORKER_DIED
from scheduler.tasks.task import MAX_TRIES, TaskState
from tests.refusals import refusing
from tests.scheduler.drivers.calls.stand import BATCH, Stand, echo
from tests.waiting import until


def numbers(count: int) -> list[bytes]:
    return [str(n).encode() for n in range(count)]


async def test_tasks_get_their_own_results(stand: Stand) -> None:
    stand.start()
    tasks = await stand.put(numbers(BATCH + 3))
    ended = await stand.ended(tasks)
    assert [s.result for s in ended] == numbers(BATCH + 3)
    assert [len(call) for call in stand.endpoint.calls] == [BATCH, 3]
    assert stand.metric("batch_padding_slots_total") == BATCH - 3
    assert stand.metric("tasks_ended_total", tier="realtime", state="done") == BATCH + 3


async def test_an_interactive_task_that_comes_during_a_call_is_in_the_next_one(stand: Stand) -> None:
    stand.endpoint.gate.clear()
    bulk = await stand.put(numbers(3 * BATCH), "bulk")
    stand.start()
    await until(lambda: bool(stand.endpoint.calls))
    late = await stand.put([b'"late"'] * 2)
    stand.endpoint.gate.set()
    await stand.ended([*bulk, *late])
    assert stand.endpoint.calls[1][:2] == [b'"late"'] * 2
    assert len(stand.endpoint.calls[1]) == BATCH  # bulk fills what is left


async def test_a_bad_item_ends_alone(stand: Stand) -> None:
    def script(items: Sequence[bytes]) -> list[ItemResult]:
        if b'"bad"' in items:
            raise CallFailed("out of memory")
        return echo(items)

    stand.endpoint.script = script
    tasks = await stand.put([*numbers(BATCH - 1), b'"bad"'])
    stand.start()
    *good, bad = await stand.ended(tasks)
    assert [s.state for s in good] == [TaskState.DONE] * (BATCH - 1)
    assert (bad.state, bad.error, bad.attempts) == (TaskState.DEAD, "out of memory", MAX_TRIES)
    assert bad.task.failures == ("out of memory",) * MAX_TRIES
    assert sorted({len(call) for call in stand.endpoint.calls}) == [1, 4, BATCH]


async def test_an_endpoint_that_is_away_costs_no_tries(stand: Stand) -> None:
    def away(items: Sequence[bytes]) -> list[ItemResult]:
        raise Unreachable("refused")

    stand.endpoint.script = away
    stand.start()
    tasks = await stand.put(numbers(2))
    await until(lambda: len(stand.endpoint.calls) > MAX_TRIES)
    stand.endpoint.script = echo
    assert {(s.state, s.attempts) for s in await stand.ended(tasks)} == {(TaskState.DONE, 1)}
    assert stand.metric("endpoint_calls_total", outcome="unreachable") > MAX_TRIES - 1


async def test_an_item_that_breaks_the_server_behind_a_proxy_ends_alone(stand: Stand) -> None:
    """The proxy says 502 then. That excuses an item only for a while, if the endpoint serves others."""

    def script(items: Sequence[bytes]) -> list[ItemResult]:
        if b'"bad"' in items:
            raise CallFailed("502", excused_s=2.0)
        return echo(items)

    stand.endpoint.script = script
    tasks = await stand.put([b'"bad"', *numbers(BATCH - 1)])
    stand.start()
    await until(lambda: len(stand.endpoint.calls) > 2)
    others = await stand.put(numbers(2 * BATCH))
    bad, *good = await stand.ended([*tasks, *others])
    assert {(s.state, s.attempts) for s in good} == {(TaskState.DONE, 1)}
    assert (bad.state, bad.error) == (TaskState.DEAD, "502")


async def test_isolated_tasks_of_a_busy_endpoint_leave_the_others_their_calls(stand: Stand) -> None:
    """Isolated tasks get their share of the calls, also while the endpoint is busy whenever it gets them."""
    answers = iter([CallFailed("500")])

    def script(items: Sequence[bytes]) -> list[ItemResult]:
        if b'"bad"' in items:
            raise next(answers, CallFailed("429", excused_s=math.inf))
        return echo(items)

    stand.endpoint.script = script
    first = await stand.put([b'"bad"', *numbers(BATCH - 1)], "bulk")
    stand.start()
    await until(lambda: len(stand.endpoint.calls) > 1)
    others = await stand.put(numbers(40 * BATCH), "bulk")
    assert {s.state for s in await stand.ended(others)} == {TaskState.DONE}
    assert (await stand.states(first))[0].state in (TaskState.QUEUED, TaskState.RUNNING)


async def test_a_call_outlasts_a_store_that_refuses_writes(stand: Stand, valkey_url: str) -> None:
    """The call goes on while heartbeats are refused, and its results are written when the store takes writes again."""
    stand.endpoint.gate.clear()
    tasks = await stand.put(numbers(BATCH))
    _, running = stand.start()
    await until(lambda: bool(stand.endpoint.calls))
    with refusing(valkey_url), capture_logs() as said:
        away = "the store is away; the worker keeps its work and tries again"
        await until(lambda: away in [entry["event"] for entry in said])
        stand.endpoint.gate.set()
        await until(lambda: stand.metric("endpoint_calls_total", outcome="ok") == 1)
        assert not running.done()
    assert {(s.state, s.attempts) for s in await stand.ended(tasks)} == {(TaskState.DONE, 1)}
    assert len(stand.endpoint.calls) == 1


async def test_draining_ends_the_call_under_way_and_claims_no_more(stand: Stand) -> None:
    stand.endpoint.gate.clear()
    tasks = await stand.put(numbers(2 * BATCH))
    loop, running = stand.start()
    await until(lambda: bool(stand.endpoint.calls))
    loop.drain()
    stand.endpoint.gate.set()
    await running
    states = [s.state for s in await stand.states(tasks)]
    assert states == [TaskState.DONE] * BATCH + [TaskState.QUEUED] * BATCH
    assert await stand.registry.workers() == []


async def test_stopping_gives_the_call_under_way_back(stand: Stand) -> None:
    stand.endpoint.gate.clear()
    tasks = await stand.put(numbers(BATCH))
    loop, running = stand.start()
    await until(lambda: bool(stand.endpoint.calls))
    loop.stop()
    await running
    assert {(s.state, s.attempts) for s in await stand.states(tasks)} == {(TaskState.QUEUED, 0)}


async def test_a_cancelled_task_keeps_no_result(stand: Stand) -> None:
    stand.endpoint.gate.clear()
    first, second = await stand.put(numbers(2))
    stand.start()
    await until(lambda: bool(stand.endpoint.calls))
    await stand.queue.cancel(first)
    stand.endpoint.gate.set()
    states = [s.state for s in await stand.ended([first, second])]
    assert states == [TaskState.CANCELLED, TaskState.DONE]


async def test_tasks_that_have_waited_too_long_are_not_called(stand: Stand) -> None:
    late = await stand.put(numbers(BATCH), age_ms=60_000, timeout_ms=30_000)
    fresh = await stand.put(numbers(3), age_ms=60_000, timeout_ms=90_000)
    stand.start()
    assert {s.state for s in await stand.ended(fresh)} == {TaskState.DONE}
    ended = await stand.ended(late)
    assert {(s.state, s.error) for s in ended} == {(TaskState.DEAD, "It waited longer than its timeout of 30 s.")}
    assert stand.endpoint.calls == [[task.input for task in fresh]]


async def test_an_item_that_kills_workers_ends_alone(stand: Stand) -> None:
    """The item ends the process, as a crash in native code does. Each time, a supervisor starts a new one."""

    def crash(items: Sequence[bytes]) -> list[ItemResult]:
        if b'"bad"' in items:
            raise EndpointHangs("as good as dead")
        return echo(items)

    stand.endpoint.script = crash
    tasks = await stand.put([*numbers(BATCH - 1), b'"bad"'])
    for _ in range(MAX_TRIES):
        _, running = stand.start()
        with pytest.raises(EndpointHangs):
            await asyncio.wait_for(running, 30)
    stand.start()
    *good, bad = await stand.ended(tasks)
    assert {s.state for s in good} == {TaskState.DONE}
    assert (bad.state, bad.error) == (TaskState.DEAD, WORKER_DIED)


@pytest.mark.parametrize("seed", [1])
async def test_each_of_3000_tasks_ends_in_a_result_or_a_dead_letter(stand: Stand, seed: int) -> None:
    """Calls and items fail at random, some items always, and the worker is killed three times in mid-call."""
    draw = random.Random(seed)
    bad = {str(n).encode() for n in draw.sample(range(3000), 6)}

    def script(items: Sequence[bytes]) -> list[ItemResult]:
        if draw.random() < 0.05 or bad & set(items):
            raise CallFailed("the call failed")
        return [ItemResult(i) if draw.random() > 0.03 else ItemResult(error="the item failed") for i in items]

    stand.endpoint.script = script
    thirds = [await stand.put(numbers(3000)[n::3], tier) for n, tier in enumerate(("realtime", "bulk", "batch"))]
    tasks = [task for third in thirds for task in third]
    for kill in range(1, 4):
        stand.endpoint.gate.set()
        _, running = stand.start()
        await until(lambda n=kill: len(stand.endpoint.calls) > 40 * n)  # type: ignore[misc]
        stand.endpoint.gate.clear()
        count = len(stand.endpoint.calls)
        await until(lambda n=count: len(stand.endpoint.calls) > n)  # type: ignore[misc]
        await stand.kill(running)
    stand.endpoint.gate.set()
    stand.start()
    ended = await stand.ended(tasks, timeout_s=60)
    assert len(ended) == 3000
    inputs = {task.id: task.input for task in tasks}
    assert all(s.result == inputs[s.task.id] for s in ended if s.state is TaskState.DONE)
    dead = [s for s in ended if s.state is TaskState.DEAD]
    assert bad <= {inputs[s.task.id] for s in dead}
    assert all(s.error and len(s.task.failures) == s.attempts == MAX_TRIES for s in dead)
    assert len(dead) < 60


async def test_two_workers_share_the_tasks_of_a_third_that_is_killed(stand: Stand) -> None:
    """Nobody starts the third worker again: the others notice that its heartbeats have stopped."""
    stand.endpoint.gate.clear()
    tasks = await stand.put(numbers(BATCH))
    _, running = stand.start("w3")
    await until(lambda: bool(stand.endpoint.calls))
    stand.start("w1")
    stand.start("w2")

    async def are_announced() -> bool:
        return len(await stand.registry.workers()) == 3

    await until(are_announced)
    await stand.kill(running)
    stand.endpoint.gate.set()
    assert {s.state for s in await stand.ended(tasks)} == {TaskState.DONE}


async def test_a_worker_says_that_no_controller_explains_it(stand: Stand) -> None:
    """The gateway reads what the controllers of all workers say as JSON."""
    stand.start()

    async def is_announced() -> bool:
        return bool(await stand.registry.sla())

    await until(is_announced)
    assert [json.loads(said) for said in (await stand.registry.sla()).values()] == [{}]
