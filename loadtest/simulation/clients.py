"""Simulated clients, which send traffic through the gateway's own `SchedulerClient` and record the answers.

Arrivals do not wait for earlier answers, but a closed loop sends its next request only after an answer. A client gives
up after the timeout of its tier in tiers.yaml, and does not repeat a rejected request. After a rejection, a closed loop
waits for the time that the rejection names before it sends its next request. Knows requests and time; does not know
workers.
"""

import asyncio
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from msgspec import structs

from engine.interface import SamplingParams
from loadtest.simulation.deployment import Deployment
from loadtest.simulation.observation import Observation, RequestRecord
from loadtest.simulation.traffic import OfferedRequest, RequestLoop, Traffic
from scheduler.client.rejection import DEMOTES, Rejected
from scheduler.client.token_stream import TokenStream
from scheduler.request import VERSION, EventKind, Request, TokenEvent

UNFINISHED = "unfinished when the run ended"
TIMED_OUT = "no token within the tier's timeout"


class SimulatedClients:
    """The clients of one simulated run.

    If `gather_s` is not 0, the requests of one tier that arrive within this time enter the queue together, as they do
    in a gateway that receives thousands of requests a second. Each request still counts from its own arrival time.
    """

    def __init__(self, deployment: Deployment, observation: Observation, gather_s: float = 0.0) -> None:
        self._deployment = deployment
        self._clock = deployment.clock
        self._client = deployment.client
        self._tiers = deployment.tiers
        self._observation = observation
        self._gather_s = gather_s
        self._asking: dict[asyncio.Task[Any], None] = {}  # used as an ordered set, in the order of their start
        self._backlogs: list[asyncio.Task[None]] = []  # streams that go on after the load
        self._broken: list[BaseException] = []

    def fill(self, traffic: Traffic) -> None:
        """Start the closed loops, which fill the engines before the load begins."""
        for name in traffic.classes:
            self._observation.gaps_s[name] = array("d")
        for loop in traffic.loops:
            for _ in range(loop.streams):
                stream = asyncio.create_task(self._stream(loop))
                if loop.ends_with_load:
                    self._await(stream)
                else:
                    self._backlogs.append(stream)

    async def offer(self, arrivals: Sequence[OfferedRequest], duration_s: float) -> None:
        """Send all `arrivals` at their times. Return when `duration_s` has passed."""
        await self._send(arrivals)
        await self._sleep_until(duration_s)

    async def finish(self, drain_s: float) -> None:
        """Wait up to `drain_s` for the answers to requests that have arrived. Backlogs go on meanwhile.

        Then cancel all unfinished requests. Raises the clients' errors.
        """
        if self._asking:
            await asyncio.wait(self._asking, timeout=drain_s)
        left = [*self._asking, *self._backlogs]
        for task in left:
            task.cancel()
        ended = await asyncio.gather(*left, return_exceptions=True)
        broken = [e for e in ended if isinstance(e, Exception)]
        for error in [*self._broken, *broken]:
            raise error

    async def _send(self, arrivals: Sequence[OfferedRequest]) -> None:
        if not self._gather_s:
            for offered in arrivals:
                await self._sleep_until(offered.at_s)
                self._start([offered])
            return
        for tick, together in groupby(arrivals, key=lambda r: int(r.at_s / self._gather_s)):
            await self._sleep_until((tick + 1) * self._gather_s)
            by_tier: dict[str, list[OfferedRequest]] = {}
            for offered in together:
                by_tier.setdefault(offered.tier, []).append(offered)
            for group in by_tier.values():
                self._start(group)

    def _start(self, group: Sequence[OfferedRequest]) -> None:
        self._await(asyncio.create_task(self._ask(group)))

    def _await(self, task: "asyncio.Task[Any]") -> None:
        """Let `finish` wait for this task, and raise its error."""
        self._asking[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._asking.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broken.append(error)

    async def _stream(self, loop: RequestLoop) -> None:
        for offered in loop.requests:
            if loop.ends_with_load and self._now_s() >= self._observation.duration_s:
                return
            rejected = await self._ask([offered], at_s=self._now_s())
            if rejected is not None:
                await self._clock.sleep(rejected.retry_after_s)

    async def _ask(self, group: Sequence[OfferedRequest], at_s: float | None = None) -> Rejected | None:
        """Send requests of one tier and receive their answers. Return the rejection, or None if they were admitted.

        With `at_s` the requests arrive at this time instead of at their planned times.
        """
        arrived_s = [offered.at_s if at_s is None else at_s for offered in group]
        records = [_record(offered, when) for offered, when in zip(group, arrived_s, strict=True)]
        self._observation.requests += records
        requests = [self._request(offered, when) for offered, when in zip(group, arrived_s, strict=True)]
        outcome = await self._submit(requests, records)
        if isinstance(outcome, Rejected):
            for record in records:
                record.rejected = outcome.reason.value
            return outcome
        by_id = {request.id: record for request, record in zip(requests, records, strict=True)}
        await self._receive(outcome, by_id)
        return None

    async def _submit(self, requests: list[Request], records: Sequence[RequestRecord]) -> TokenStream | Rejected:
        """Submit the requests. If their tier is overloaded and has `demote_to`, submit them to that tier instead.

        If that tier refuses them, too, what their own tier said counts.
        """
        outcome = await self._client.submit(requests)
        below = self._tiers[requests[0].tier].admission.demote_to
        if below is None or not isinstance(outcome, Rejected) or outcome.reason not in DEMOTES:
            return outcome
        deadline_ms = self._tiers[below].deadline_ms
        lower = await self._client.submit(
            [structs.replace(r, tier=below, deadline_ms=r.arrival_ms + deadline_ms) for r in requests]
        )
        if isinstance(lower, Rejected):
            return outcome
        for record in records:
            record.served_tier = below
        return lower

    async def _receive(self, generation: TokenStream, records: dict[str, RequestRecord]) -> None:
        first = next(iter(records.values()))
        tier, timeout_ms = self._tiers[first.tier], self._tiers[first.served_tier].timeout_ms
        patience_s = None if timeout_ms is None else timeout_ms / 1000
        target_ms = tier.slo.itl_p99_ms
        target_s = float("inf") if target_ms is None else target_ms / 1000
        loop = asyncio.get_running_loop()
        failure = UNFINISHED
        try:
            async with asyncio.timeout(patience_s) as patience, generation as events:
                async for event in events:
                    self._record_event(records[event.request_id], event, target_s)
                    if patience_s is not None:
                        patience.reschedule(loop.time() + patience_s)
        except TimeoutError:
            failure = TIMED_OUT
        finally:
            for record in records.values():
                if record.ended_s is None:
                    record.failed = failure

    def _record_event(self, record: RequestRecord, event: TokenEvent, target_s: float) -> None:
        now_s = self._now_s()
        if event.token_ids:
            record.output_tokens += len(event.token_ids)
            if record.last_token_s is None:
                record.first_token_s, record.first_tokens = now_s, record.output_tokens
                record.cached_tokens = event.cached_tokens
            else:
                gap_s = now_s - record.last_token_s
                record.gaps += 1
                record.gaps_missed += gap_s > target_s
                self._observation.gaps_s[record.traffic_class].append(gap_s)
            record.last_token_s = now_s
            if 0 <= now_s <= self._observation.duration_s:
                self._observation.tokens[record.traffic_class] += len(event.token_ids)
        if event.is_last:
            record.ended_s = now_s
            if event.kind is not EventKind.FINISHED:
                record.failed = event.error or event.kind.value

    def _request(self, offered: OfferedRequest, arrived_s: float) -> Request:
        arrival_ms = self._clock.wall_ms() - round(1000 * (self._now_s() - arrived_s))
        tier = self._tiers[offered.tier]
        deadline_ms = tier.deadline_ms if offered.deadline_s is None else round(1000 * offered.deadline_s)
        return Request(
            id=offered.id,
            tier=offered.tier,
            prompt_token_ids=offered.prompt_token_ids,
            sampling=SamplingParams(
                max_tokens=offered.output_tokens, temperature=0.0, seed=offered.seed, ignore_eos=True
            ),
            arrival_ms=arrival_ms,
            deadline_ms=arrival_ms + deadline_ms,
            reply_to=self._client.gateway_id,
            version=VERSION,
            owner=offered.owner,
            weight=offered.weight,
        )

    def _now_s(self) -> float:
        return self._clock.now() - self._deployment.begins_s

    async def _sleep_until(self, when_s: float) -> None:
        delay_s = when_s - self._now_s()
        if delay_s > 0:
            await self._clock.sleep(delay_s)


def _record(offered: OfferedRequest, arrived_s: float) -> RequestRecord:
    name, tier, prompt = offered.traffic_class, offered.tier, len(offered.prompt_token_ids)
    return RequestRecord(offered.id, name, tier, arrived_s, prompt, offered.deadline_s, served_tier=tier)
