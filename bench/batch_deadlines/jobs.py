"""Jobs of a simulated gateway: they run on a simulated deployment as the batches of a real one do.

Jobs take the decisions of gateway/batches: which are admitted, when each line is due, which line is next. As best
effort, every job is admitted and all lines have the deadline of their tier.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import msgspec

from bench.batch_deadlines.hindsight import KnownJob
from engine.interface import SamplingParams
from gateway.batches.estimate import (
    Lengths,
    Rates,
    Work,
    line_times,
    rates_of,
    work_left,
)
from gateway.batches.line_deadlines import LineDeadlines, LineTimes
from gateway.batches.line_window import JobShare, LineWindow
from gateway.batches.model import Batch, BatchStatus
from gateway.batches.promises import Commitment, earliest_promise_s
from gateway.batches.size import TOKEN_BYTES, InputSize
from loadtest.simulation.deployment import Deployment
from scheduler.client.rejection import Rejected
from scheduler.request import Delivery, EventKind, Request

LINES_IN_FLIGHT = 32  # of all jobs together; fewer than in a gateway, since a simulated step takes time for each
PAUSE_S = 1.0  # seconds before a refused line is tried again, and between two computations of line times
ENDPOINT = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Job:
    """A job that is sent at `at_s`. Each line has `prompt_tokens`, and up to `max_tokens` of output."""

    name: str
    at_s: float
    window_s: int
    lines: int
    prompt_tokens: int = 96
    min_output: int = 16
    max_tokens: int = 64


@dataclass(slots=True)
class JobOutcome:
    name: str
    window_s: int
    lines: int
    admitted: bool = True
    finished: int = 0  # lines within the window
    ended_s: float | None = None  # seconds from its arrival to its last line; None: its window passed before

    @property
    def is_on_time(self) -> bool:
        return self.finished == self.lines


@dataclass(slots=True, eq=False)
class _Running:
    """A job that runs: its record, as a gateway has it."""

    job: Job
    batch: Batch
    outcome: JobOutcome
    deadlines: LineDeadlines
    times: LineTimes = LineTimes()
    times_s: float = -PAUSE_S  # when they were computed


@dataclass(slots=True)
class JobRunner:
    """Runs jobs on a simulated deployment as a gateway runs batches.

    `keeps_deadlines` is False for best effort.
    """

    deployment: Deployment
    keeps_deadlines: bool
    rng: Random
    lengths: Lengths = Lengths()
    running: list[_Running] = field(default_factory=list)
    outcomes: list[JobOutcome] = field(default_factory=list)
    left: list[float] = field(default_factory=list)  # share of the engine that chats left, in each second
    window: LineWindow = field(default_factory=lambda: LineWindow(LINES_IN_FLIGHT))

    async def run(self, jobs: Sequence[Job]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_chats())
            for job in jobs:
                tasks.create_task(self._run_job(job))

    async def _watch_chats(self) -> None:
        clock, cores = self.deployment.clock, [worker.core for worker in self.deployment.workers]
        await clock.sleep(self.deployment.begins_s - clock.now())
        taken_s = sum(core.interactive_s for core in cores)
        while True:
            await clock.sleep(1.0)
            before_s, taken_s = taken_s, sum(core.interactive_s for core in cores)
            self.left.append(max(0.0, len(cores) - (taken_s - before_s)))

    def known_jobs(self, jobs: Sequence[Job]) -> list[KnownJob]:
        """Return the jobs that were sent, with the work that they have by what lines and rates were at the end."""
        rates, sent = self._rates(), {outcome.name: outcome for outcome in self.outcomes}
        found = []
        for job in jobs:
            if rates is not None and job.name in sent:
                batch = _batch_of(job, 0)
                work_s = rates.expected_s(self._work(batch))
                found.append(KnownJob(job.at_s, job.at_s + batch.lines_due_s, work_s, sent[job.name].admitted))
        return found

    async def _run_job(self, job: Job) -> None:
        clock = self.deployment.clock
        await clock.sleep(self.deployment.begins_s + job.at_s - clock.now())
        batch = _batch_of(job, clock.wall_ms() // 1000)
        outcome = JobOutcome(job.name, job.window_s, job.lines)
        self.outcomes.append(outcome)
        outcome.admitted = not self.keeps_deadlines or self._is_feasible(batch)
        if not outcome.admitted:
            return
        running = _Running(job, batch, outcome, LineDeadlines(batch))
        self.running.append(running)
        begun_s = clock.now()
        share = self.window.join(None, lambda: self._urgent_due(running))
        try:
            async with asyncio.timeout(job.window_s), asyncio.TaskGroup() as lines:
                for number in range(job.lines):
                    charged = await share.take()
                    lines.create_task(self._run_line(running, number, share, charged))
            outcome.ended_s = clock.now() - begun_s
        except TimeoutError:
            pass
        share.leave()
        self.running.remove(running)

    async def _run_line(self, running: _Running, number: int, share: JobShare, charged: float) -> None:
        num_behind, client = running.deadlines.begin(), self.deployment.client
        output = self.rng.randint(running.job.min_output, running.job.max_tokens)
        request = self._request(running, f"{running.job.name}-{number}", output, num_behind)
        try:
            while isinstance(stream := await client.submit([request]), Rejected):
                await self.deployment.clock.sleep(PAUSE_S)
            async with stream as events:
                async for event in events:
                    if event.kind is EventKind.FINISHED:
                        self._count(running, output)
        finally:
            share.free(charged, running.job.prompt_tokens + output)

    def _count(self, running: _Running, output: int) -> None:
        batch, known, prompt = running.batch, self.lengths, running.job.prompt_tokens
        running.outcome.finished += 1
        running.batch = replace(
            batch,
            completed=batch.completed + 1,
            input_tokens=batch.input_tokens + prompt,
            output_tokens=batch.output_tokens + output,
        )
        self.lengths = Lengths(
            known.choices + 1,
            known.prompt_bytes + TOKEN_BYTES * prompt,
            known.prompt_tokens + prompt,
            known.output_tokens + output,
        )

    def _request(self, running: _Running, request_id: str, output: int, num_behind: int) -> Request:
        tier, now_ms = self.deployment.tiers.batch_tier, self.deployment.clock.wall_ms()
        request = Request(
            id=request_id,
            tier=tier,
            prompt_token_ids=(1,) * running.job.prompt_tokens,
            sampling=SamplingParams(max_tokens=output, temperature=0.0, seed=0, ignore_eos=True),
            arrival_ms=now_ms,
            deadline_ms=now_ms + self.deployment.tiers[tier].deadline_ms,
            reply_to=self.deployment.client.gateway_id,
            delivery=Delivery.AT_END,
        )
        if not self.keeps_deadlines:
            return request
        due = running.deadlines.deadline(num_behind, self._line_times(running), now_ms)
        return msgspec.structs.replace(request, deadline_ms=due.at_ms, urgent_ms=due.urgent_ms)

    def _line_times(self, running: _Running) -> LineTimes:
        now, rates, work = self.deployment.clock.now(), self._rates(), self._work(running.batch)
        if rates is not None and now - running.times_s >= PAUSE_S:
            due = running.batch.expires_at
            others = [other.batch for other in self.running if other is not running]
            sooner = [self._work(other) for other in others if other.expires_at <= due]
            running.times, running.times_s = line_times(work, sooner, rates), now
        return running.times

    def _urgent_due(self, running: _Running) -> float:
        if not self.keeps_deadlines:
            return math.inf
        tiers, now_ms = self.deployment.tiers, self.deployment.clock.wall_ms()
        return running.deadlines.urgent_due_ms(running.times, now_ms, tiers[tiers.batch_tier].urgent_ms)

    def _is_feasible(self, batch: Batch) -> bool:
        rates = self._rates()
        if rates is None:
            return True
        now_s = self.deployment.clock.wall_ms() / 1000
        promised = [
            Commitment(other.batch.lines_due_s - now_s, rates.expected_s(self._work(other.batch)))
            for other in self.running
        ]
        return earliest_promise_s(self._work(batch), promised, rates) <= batch.lines_due_s - now_s

    def _rates(self) -> Rates | None:
        return rates_of(self.deployment.client.workers, self.deployment.tiers.batch_tier)

    def _work(self, batch: Batch) -> Work:
        work = work_left(batch, self.lengths, context=4096)
        assert work is not None
        return work


def _batch_of(job: Job, now_s: int) -> Batch:
    prompt_bytes = TOKEN_BYTES * job.lines * job.prompt_tokens
    size = InputSize(job.lines, job.lines, prompt_bytes, prompt_bytes, 0, job.lines * job.max_tokens)
    expires_at, status = now_s + job.window_s, BatchStatus.IN_PROGRESS
    return Batch(job.name, ENDPOINT, "", f"{job.window_s}s", status, now_s, expires_at, total=job.lines, size=size)
