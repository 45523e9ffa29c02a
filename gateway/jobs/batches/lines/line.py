"""Run the lines of a batch as ordinary completions, in the batch tier.

A line must not fail because the queue was full or a worker died. After such answers, the line is therefore tried again,
with growing pauses. Each line gets its part of the batch's deadline. Knows HTTP statuses; does not know Redis, files,
or how many lines run at once.
"""

import asyncio
import logging
import math
import random
import secrets
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, Protocol

import structlog

from gateway.dead_letters import DeadLetters
from gateway.http.trace import UNTRACED, RequestTrace
from gateway.identity import service_tier_of
from gateway.jobs.batches.forecast.forecasts import BatchForecasts, FindModel
from gateway.jobs.batches.forecast.line_deadlines import LineDeadlines, LineTimes
from gateway.jobs.batches.forecast.line_statistics import LineStatistics
from gateway.jobs.batches.input.lines import BatchLine
from gateway.jobs.batches.lines.output import answered_line
from gateway.jobs.batches.model import Batch, LineResult
from gateway.protocol.errors import internal_error
from gateway.requests.prepare.placement import Placement
from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.request import GIVEN_UP, JobDeadline, JobPart
from scheduler.store.errors import STORE_AWAY

log = logging.getLogger(__name__)

RECEIPT_KEY = "x-tidegate-receipt"  # of a batch's metadata; "1": the answers of its lines have receipts
BUSY = (429, 503)  # a full queue, a missing worker: the line is tried again until the completion window ends
MAX_FAILURES = 4  # attempts that end with another server error; the last of these errors is the line's answer
FIRST_PAUSE_S = 0.1  # seconds between the first and the second attempt; each pause is twice the one before
LONGEST_PAUSE_S = 10.0  # seconds
TIMES_S = 1.0  # seconds between two computations of how long the lines of a batch take


class Completions(Protocol):
    """The part of CompletionService (gateway/requests/generate/service.py) that a batch needs."""

    async def complete(self, path: str, body: dict[str, Any], placement: Placement) -> tuple[int, dict[str, Any]]: ...


class BatchTracer(Protocol):
    """What records the traces of batches and of their lines. The composition root has one for OpenTelemetry."""

    def line(self, batch: Batch, line: BatchLine) -> AbstractContextManager[RequestTrace]:
        """Return the trace of a line, which runs within the block. `batch` has a `traceparent`."""
        ...

    def end(self, batch: Batch) -> None:
        """Record the span of a batch that is over. A repeated call records the same span again."""
        ...


class LineRunner:
    """Runs the lines of all batches of a gateway, each attempt in the present batch tier of the batch's model."""

    def __init__(
        self,
        completions: Completions,
        find_model: FindModel,
        clock: Clock,
        statistics: LineStatistics,
        forecasts: BatchForecasts,
        dead_letters: DeadLetters | None = None,
        tracer: BatchTracer | None = None,
    ) -> None:
        self.completions = completions
        self.find_model = find_model
        self.clock = clock
        self.statistics = statistics
        self.forecasts = forecasts
        self.dead_letters = dead_letters
        self.tracer = tracer

    def begin(self, batch: Batch) -> "BatchLines":
        """Return what runs the lines of one run of `batch`, whose record was read just now."""
        return BatchLines(self, batch)


class BatchLines:
    """Runs the lines of one run of a batch, which begin one after the other and run at the same time."""

    def __init__(self, runner: LineRunner, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch
        self._deadlines = LineDeadlines(batch)
        self._meter = runner.statistics.meter()
        self._shows_receipts = (batch.metadata or {}).get(RECEIPT_KEY) in ("1", "true")
        self._times = LineTimes()
        self._times_due_s = -math.inf  # when they are to be computed again
        self._times_lock = asyncio.Lock()

    @property
    def _tier(self) -> Tier:
        return self._runner.find_model(self._batch.model).tier

    def urgent_due(self) -> float:
        """Return when the batch is due if its next line must begin before lines of batches due later; else inf."""
        if self._batch.best_effort:
            return math.inf
        now_ms, urgent_ms = self._runner.clock.wall_ms(), self._tier.urgent_ms
        return self._deadlines.urgent_due_ms(self._times, now_ms, urgent_ms)

    async def run(self, line: BatchLine) -> LineResult:
        """Run a line until it has a final answer, and return the result. To stop the generation, cancel this call."""
        tracer = self._runner.tracer
        if tracer is None or self._batch.traceparent is None:
            return await self._run(line)
        with tracer.line(self._batch, line) as trace:
            return await self._run(line, trace)

    async def _run(self, line: BatchLine, trace: RequestTrace = UNTRACED) -> LineResult:
        deadline = await self._deadline()
        failures = attempts = 0
        while True:
            # Each attempt needs a new id, because the queue ignores a request whose id it still holds. It continues
            # what has been generated since the last failure, also for a gateway that has ended. After a failure, the
            # line begins anew: with the same tokens, it might fail again.
            part = JobPart(f"{self._batch.id}/{line.number}/{failures}", deadline)
            request_id = f"req_{secrets.token_hex(16)}"
            structlog.contextvars.bind_contextvars(request_id=request_id, tier=self._tier.name)
            status, body = await self._attempt(line, request_id, part)
            attempts += 1
            if _was_given_up(status, body):  # another attempt would end further workers
                if self._runner.dead_letters is not None:
                    await self._runner.dead_letters.assign(request_id, self._batch.id, line.custom_id, line.number)
                break
            failures += status >= 500 and status not in BUSY
            if (status < 500 and status not in BUSY) or failures == MAX_FAILURES or _is_beyond_budget(status, body):
                break
            await self._runner.clock.sleep(_pause_s(attempts - 1))
        trace.note(tidegate__attempts=attempts, http__response__status_code=status)
        return await self._result(line, request_id, status, body)

    async def _deadline(self) -> JobDeadline | None:
        """Return the deadline of the line that begins now; None in a best-effort batch."""
        if self._batch.best_effort:
            return None
        num_behind = self._deadlines.begin()  # before anything is awaited, so that lines are due in their order
        async with self._times_lock:
            if self._runner.clock.now() >= self._times_due_s:
                with suppress(*STORE_AWAY):
                    self._times = await self._runner.forecasts.line_times(self._batch)
                self._times_due_s = self._runner.clock.now() + TIMES_S
        return self._deadlines.deadline(num_behind, self._times, self._runner.clock.wall_ms())

    async def _result(self, line: BatchLine, request_id: str, status: int, body: dict[str, Any]) -> LineResult:
        """Return the result of a line, and count what it used."""
        receipt = body.get("tidegate") or {}
        if not self._shows_receipts:
            body = {name: value for name, value in body.items() if name != "tidegate"}
        result = answered_line(self._batch.id, line, request_id, status, body)
        result = replace(result, engine_us=round(1000 * (receipt.get("engine_ms") or 0)))
        await self._runner.statistics.add(self._batch, self._meter, line.body, result)
        return result

    async def _attempt(self, line: BatchLine, request_id: str, part: JobPart) -> tuple[int, dict[str, Any]]:
        runner, batch, tier = self._runner, self._batch, self._tier
        service_tier = service_tier_of(tier)
        placement = Placement(
            tier,
            service_tier,
            request_id,
            batch.owner,
            receipt_for=service_tier,  # a receipt says how much engine time the line took
            part=part,
            is_limited=False,
        )
        try:
            return await runner.completions.complete(batch.endpoint, line.body, placement)
        except STORE_AWAY:
            return 503, internal_error("The store is not reachable at the moment.").body()
        except Exception:  # a bug that one line triggers must not end the other lines
            log.exception("a batch line failed")
            return 500, internal_error().body()


def _was_given_up(status: int, body: dict[str, Any]) -> bool:
    return status == 500 and (body.get("error") or {}).get("code") in GIVEN_UP


def _is_beyond_budget(status: int, body: dict[str, Any]) -> bool:
    """Return whether the budget of the key or its project is spent: the line fails, for it might wait for a month."""
    return status == 429 and (body.get("error") or {}).get("code") == "insufficient_quota"


def _pause_s(pauses: int) -> float:
    """Return the seconds of the next pause, after `pauses` earlier pauses.

    Each pause is twice as long as the one before, up to `LONGEST_PAUSE_S`. It is then shortened by a random part of up
    to 25 %, so that lines do not retry all at once.
    """
    pause_s: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(pauses, 20))
    return pause_s * random.uniform(0.75, 1.0)
