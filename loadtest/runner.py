"""Drives one arm: sends what the workload planned, when it was planned, and collects what came back.

Open-loop arrivals are never delayed by slow answers; how late the client itself was is recorded. Knows time
and tasks; it does not know statistics (`estimates`) nor which arms make an experiment (`mixed`).
"""

import asyncio
import resource
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from loadtest.answer import Outcome
from loadtest.http_client import Target, completion_body, send
from loadtest.scenario import ClosedLoop, OpenLoop, TrafficClass
from loadtest.workload import PlannedRequest, plan_closed_loop, plan_open_loop, token_prompt, word_prompt

MAX_IN_FLIGHT = 900  # below the usual limit of 1024 open files
ERROR_PAUSE_S = 0.5  # a closed loop's pause after an error without Retry-After: it must not spin
OVERFLOW = "not sent: too many requests in flight"
UNFINISHED = "unfinished when the arm ended"


BusyProbe = Callable[[], Awaitable[float | None]]


async def unknown_busy_time() -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class ArmWindow:
    """How long an arm runs: closed loops fill up for `lead_s`, then `duration_s` is measured, then open-loop
    requests have `drain_s` to finish."""

    duration_s: float
    lead_s: float = 3.0
    drain_s: float = 20.0


@dataclass(slots=True)
class ArmRun:
    """What one arm saw. `outcomes[name]` are the requests of a class, open loop by arrival."""

    start_s: float
    duration_s: float
    outcomes: dict[str, list[Outcome]]
    client_cpu_share: float = 0.0  # of one core, over the measured window
    lag_s: list[float] = field(default_factory=list)  # how late each open-loop request was sent
    busy_s: float | None = None  # engine time spent in the window, where a probe could tell

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
) -> ArmRun:
    """Run the classes together. The same (class, seed, round_) sends the same requests in every arm.
    `busy_probe` reads the server's counter of engine seconds, at both ends of the window."""
    closed = [(c, c.arrivals.streams) for c in classes if isinstance(c.arrivals, ClosedLoop)]
    opened = [c for c in classes if isinstance(c.arrivals, OpenLoop)]
    start_s = perf_counter() + (window.lead_s if closed else 0.0)
    run = ArmRun(start_s, window.duration_s, {c.name: [] for c in classes})
    # 1. everything random is drawn before the clock runs
    plans = [(c, plan_open_loop(c, window.duration_s, seed, round_)) for c in opened]
    # 2. backlogs fill the server during the lead
    backlogs = [
        asyncio.create_task(_run_closed_loop(target, c, streams, plan_closed_loop(c, seed, round_), run))
        for c, streams in closed
    ]
    try:
        # 3. the measured window
        await _sleep_until(start_s)
        cpu_before_s, busy_before = _cpu_s(), asyncio.ensure_future(busy_probe())
        arrivals = [asyncio.create_task(_run_open_loop(target, c, plan, run)) for c, plan in plans]
        await _sleep_until(run.end_s)
        run.client_cpu_share = (_cpu_s() - cpu_before_s) / window.duration_s
        run.busy_s = _difference(await busy_probe(), await busy_before)
        # 4. open-loop requests finish beside the backlog that they met
        in_flight = [task for tasks in await asyncio.gather(*arrivals) for task in tasks]
        await _finish(in_flight, window.drain_s)
        _give_up(o for c in opened for o in run.outcomes[c.name])
    finally:
        await _finish(backlogs, 0.0)
    _mark_unfinished(run)
    return run


async def _run_open_loop(
    target: Target, traffic: TrafficClass, plan: Sequence[PlannedRequest], run: ArmRun
) -> list[asyncio.Task[None]]:
    """Send each request at its time; the tasks that were started."""
    tasks: list[asyncio.Task[None]] = []
    in_flight: set[asyncio.Task[None]] = set()
    for planned in plan:
        path, body = request_for(target, traffic, planned)
        outcome = Outcome(traffic.name, planned.index, due_s=run.start_s + planned.at_s)
        run.outcomes[traffic.name].append(outcome)
        await _sleep_until(outcome.due_s)
        run.lag_s.append(max(0.0, perf_counter() - outcome.due_s))
        if len(in_flight) >= MAX_IN_FLIGHT:
            outcome.error = OVERFLOW
            continue
        task = asyncio.create_task(send(target, path, body, outcome, streamed=True))
        in_flight.add(task)
        task.add_done_callback(in_flight.discard)
        tasks.append(task)
    return tasks


async def _run_closed_loop(
    target: Target, traffic: TrafficClass, streams: int, plan: Iterator[PlannedRequest], run: ArmRun
) -> None:
    """Keep `streams` requests in flight until cancelled."""

    async def one_stream() -> None:
        for planned in plan:
            path, body = request_for(target, traffic, planned)
            outcome = Outcome(traffic.name, planned.index, due_s=perf_counter())
            run.outcomes[traffic.name].append(outcome)
            await send(target, path, body, outcome, streamed=True)
            if outcome.error is not None:
                await asyncio.sleep(outcome.retry_after_s or ERROR_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(one_stream())


def request_for(target: Target, traffic: TrafficClass, planned: PlannedRequest) -> tuple[str, bytes]:
    """(path, JSON body) of a planned request."""
    prompt = word_prompt(planned) if traffic.endpoint == "chat" else token_prompt(planned)
    return completion_body(
        target, prompt, planned.output_tokens, service_tier=traffic.service_tier, **traffic.extra_body
    )


async def _sleep_until(when_s: float) -> None:
    delay_s = when_s - perf_counter()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


async def _finish(tasks: Sequence[asyncio.Task[None]], timeout_s: float) -> None:
    """Wait for tasks up to `timeout_s`, then cancel the rest; errors of theirs are raised."""
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
    """Nobody waits any longer for what is unanswered. Left out, the slowest requests would make the quantiles
    better. (A closed loop's last requests are cut off by the end of the arm, not by their slowness.)"""
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
    """CPU seconds that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
