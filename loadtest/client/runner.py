"""Run one arm: send planned requests at their times, and collect the outcomes.

Slow answers never delay open-loop requests. The delay that the client itself causes is recorded. Knows time and tasks;
does not know statistics (see `estimates`) or which arms make an experiment (see `mixed`).
"""

import asyncio
import resource
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from loadtest.client.answer import Outcome
from loadtest.client.http import Target, completion_body, send
from loadtest.traffic.prompts import token_prompt, word_prompt
from loadtest.traffic.scenario import TrafficClass
from loadtest.traffic.scenario_arrivals import ClosedLoop, OpenLoop
from loadtest.traffic.workload import PlannedRequest, plan_closed_loop, plan_open_loop

MAX_IN_FLIGHT = 900  # below the usual limit of 1024 open files
ERROR_PAUSE_S = 0.5  # pause of a closed loop after an error without Retry-After, which prevents a busy loop
OVERFLOW = "not sent: too many requests in flight"
UNFINISHED = "unfinished when the arm ended"
POLL_S = 0.05  # seconds between two calls of `should_stop`

BusyProbe = Callable[[], Awaitable[float | None]]
Turn = AbstractAsyncContextManager[None]  # held by a request while it is sent and answered


async def unknown_busy_time() -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class ArmWindow:
    """The phases of an arm.

    Closed loops fill the server for `lead_s`. Then results are measured for `duration_s`. Then open-loop requests have
    `drain_s` to finish, beside the closed loops. With `drains_closed_loops`, closed loops send no more then, and their
    requests can finish, too.
    """

    duration_s: float
    lead_s: float = 3.0
    drain_s: float = 20.0
    drains_closed_loops: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of an experiment: each arm is measured for `duration_s` in total, divided into `rounds` parts."""

    duration_s: float
    rounds: int = 2
    lead_s: float = 5.0  # time for a backlog to fill the server before a part is measured
    settle_s: float = 1.0  # pause before each part, after the server has become idle
    drain_s: float = 20.0  # time for open-loop requests to finish after each part

    @property
    def part_s(self) -> float:
        return self.duration_s / self.rounds

    @property
    def window(self) -> ArmWindow:
        return ArmWindow(self.part_s, self.lead_s, self.drain_s)


@dataclass(slots=True)
class ArmRun:
    """The outcomes of one arm in one round.

    `outcomes` maps the name of each class to its requests. Open-loop requests are in order of arrival.
    """

    start_s: float
    duration_s: float
    outcomes: dict[str, list[Outcome]]
    client_cpu_share: float = 0.0  # share of one core over the measured window
    lag_s: list[float] = field(default_factory=list)  # delay with which each open-loop request was sent
    busy_s: float | None = None  # engine time in the window; None if unknown
    planned: int = 0  # number of open-loop requests planned for the whole window
    was_cut: bool = False  # `should_stop` or a cancellation ended the arm early

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


async def run_arm(
    target: Target,
    classes: Sequence[TrafficClass],
    window: ArmWindow,
    seed: int,
    round_: int,
    busy_probe: BusyProbe = unknown_busy_time,
    should_stop: Callable[[ArmRun], bool] | None = None,
    at_once: int | None = None,
    on_start: Callable[[ArmRun], None] | None = None,
) -> ArmRun:
    """Run all `classes` at the same time. A class sends the same requests in every arm with the same seed and `round_`.

    `busy_probe` reads the server's counter of engine seconds at both ends of the window. Once `should_stop` returns
    True, nothing more is sent, and the answers to open requests are not awaited. With `at_once`, at most so many
    requests are sent at the same time; the others wait for their turn in the client, in order, and their times include
    that. `on_start` gets the run before it is filled, and keeps it if the call is cancelled.
    """
    closed = [(c, c.arrivals.streams) for c in classes if isinstance(c.arrivals, ClosedLoop)]
    opened = [c for c in classes if isinstance(c.arrivals, OpenLoop)]
    start_s = perf_counter() + (window.lead_s if closed else 0.0)
    run = ArmRun(start_s, window.duration_s, {c.name: [] for c in classes})
    turn = nullcontext() if at_once is None else asyncio.Semaphore(at_once)
    if on_start is not None:
        on_start(run)
    # 1. make all random draws before the clock runs
    plans = [(c, plan_open_loop(c, window.duration_s, seed, round_)) for c in opened]
    run.planned = sum(len(plan) for _, plan in plans)
    # 2. let backlogs fill the server during the lead
    backlogs = [
        asyncio.create_task(_run_closed_loop(target, c, streams, plan_closed_loop(c, seed, round_), run, turn, window))
        for c, streams in closed
    ]
    sent: list[asyncio.Task[None]] = []
    arrivals: list[asyncio.Task[None]] = []
    try:
        # 3. measure
        await _sleep_until(start_s)
        cpu_before_s, busy_before = _cpu_s(), asyncio.ensure_future(busy_probe())
        arrivals += [asyncio.create_task(_run_open_loop(target, c, plan, run, sent, turn)) for c, plan in plans]
        await _sleep_to_the_end(run, should_stop)
        run.client_cpu_share = (_cpu_s() - cpu_before_s) / run.duration_s
        run.busy_s = _difference(await busy_probe(), await busy_before)
        # 4. let open-loop requests finish; the backlogs go on, or finish too
        await _finish(arrivals, 0.0 if run.was_cut else None)
        drained = backlogs if window.drains_closed_loops else []
        await _finish([*sent, *drained], 0.0 if run.was_cut else window.drain_s)
        drained_classes = classes if window.drains_closed_loops else opened
        _give_up(o for c in drained_classes for o in run.outcomes[c.name])
    except asyncio.CancelledError:
        run.was_cut = True
        run.duration_s = min(run.duration_s, max(0.0, perf_counter() - run.start_s))
        raise
    finally:
        try:
            await _finish([*backlogs, *arrivals], 0.0)
        finally:
            await _finish(sent, 0.0)  # after the arrivals, which add to it until they have ended
            _mark_unfinished(run)
    return run


async def _run_open_loop(
    target: Target,
    traffic: TrafficClass,
    plan: Sequence[PlannedRequest],
    run: ArmRun,
    sent: list[asyncio.Task[None]],
    turn: Turn,
) -> None:
    """Send each request at its time, and append its task to `sent`."""
    in_flight: set[asyncio.Task[None]] = set()
    for planned in plan:
        path, body = request_for(target, traffic, planned)
        outcome = Outcome(traffic.name, planned.index, due_s=run.start_s + planned.at_s)
        await _sleep_until(outcome.due_s)
        run.outcomes[traffic.name].append(outcome)
        run.lag_s.append(max(0.0, perf_counter() - outcome.due_s))
        if len(in_flight) >= MAX_IN_FLIGHT:
            outcome.error = OVERFLOW
            continue
        task = asyncio.create_task(_send_in_turn(turn, target, path, body, outcome, traffic.stream))
        in_flight.add(task)
        task.add_done_callback(in_flight.discard)
        sent.append(task)


async def _run_closed_loop(
    target: Target,
    traffic: TrafficClass,
    streams: int,
    plan: Iterator[PlannedRequest],
    run: ArmRun,
    turn: Turn,
    window: ArmWindow,
) -> None:
    """Keep `streams` requests in flight, until the task is cancelled or the window of a loop that drains has ended."""

    def left_s() -> float:
        return run.end_s - perf_counter() if window.drains_closed_loops else inf

    async def one_stream() -> None:
        for planned in plan:
            path, body = request_for(target, traffic, planned)
            outcome = Outcome(traffic.name, planned.index, due_s=perf_counter())
            run.outcomes[traffic.name].append(outcome)
            await _send_in_turn(turn, target, path, body, outcome, traffic.stream)
            if outcome.error is not None:
                await asyncio.sleep(max(0.0, min(outcome.retry_after_s or ERROR_PAUSE_S, left_s())))
            if left_s() <= 0:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(one_stream())


async def _send_in_turn(
    turn: Turn, target: Target, path: str, body: bytes, outcome: Outcome, is_streamed: bool
) -> None:
    async with turn:
        await send(target, path, body, outcome, is_streamed)


def request_for(target: Target, traffic: TrafficClass, planned: PlannedRequest) -> tuple[str, bytes]:
    """Return the path and the JSON body of a planned request."""
    prompt = word_prompt(planned) if traffic.endpoint == "chat" else token_prompt(planned)
    return completion_body(
        target,
        prompt,
        planned.output_tokens,
        stream=traffic.stream,
        service_tier=traffic.service_tier,
        **traffic.extra_body,
    )


async def _sleep_to_the_end(run: ArmRun, should_stop: Callable[[ArmRun], bool] | None) -> None:
    """Sleep until the window ends or `should_stop` returns True. In the second case, shorten the window of `run`."""
    while should_stop is not None and perf_counter() + POLL_S < run.end_s:
        await asyncio.sleep(POLL_S)
        if should_stop(run):
            run.was_cut, run.duration_s = True, perf_counter() - run.start_s
            return
    await _sleep_until(run.end_s)


async def _sleep_until(when_s: float) -> None:
    delay_s = when_s - perf_counter()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


async def _finish(tasks: Sequence[asyncio.Task[None]], timeout_s: float | None) -> None:
    """Wait up to `timeout_s` for the tasks (None: without limit), then cancel the unfinished ones.

    Raises the errors of the tasks.
    """
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def _give_up(outcomes: Iterable[Outcome]) -> None:
    """Mark unanswered open-loop requests as given up, so that they count with the time that they had waited.

    If the slowest requests were left out, the quantiles would look better than they are. Requests of closed loops are
    not marked: they are unanswered because the arm ended, not because they were slow.
    """
    now_s = perf_counter()
    for outcome in outcomes:
        if outcome.finished_s is None and outcome.error in (None, OVERFLOW):
            outcome.given_up_s = now_s


def _mark_unfinished(run: ArmRun) -> None:
    for outcomes in run.outcomes.values():
        for outcome in outcomes:
            if outcome.finished_s is None and outcome.error is None:
                outcome.error = UNFINISHED


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _cpu_s() -> float:
    """Return the CPU seconds that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
