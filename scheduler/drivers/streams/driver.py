"""The driver of a worker in front of a server: opens streams, hangs up, and passes what comes to the core.

Makes no decisions: `StreamCore` does. One task for each stream, one that watches whether the server is there, and
the loop that carries out decisions. Knows asyncio and the protocol `Upstream`; does not know HTTP.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any

import structlog

from engine.streaming import (
    StreamRequest,
    Upstream,
    UpstreamBusy,
    UpstreamError,
    UpstreamLost,
    UpstreamRefused,
    UpstreamUnreachable,
)
from scheduler.control.windows import UPDATE_S
from scheduler.drivers.streams.core import StreamCore
from scheduler.request import Lease
from scheduler.worker.driver import RequestWorker

log = structlog.get_logger()

RISK_CHECK_S = 0.05  # seconds between two looks at interactive requests that await their first token
LOAD_S = 1.0  # seconds between two looks at the server's own metrics


class StreamDriver:
    """Implements `scheduler.worker.driver.Driver`."""

    def __init__(self, core: StreamCore, upstream: Upstream) -> None:
        self.core = core
        self.info = upstream.info
        self.unsupported = upstream.unsupported
        self._upstream = upstream
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # tasks of streams that were hung up
        self._failed: BaseException | None = None
        self._stream_lost = asyncio.Event()  # set when a stream broke off: what the server said before may be over
        self._was_down = False

    @property
    def is_stuck(self) -> bool:
        """Whether the server is away, so that other workers and the gateways must not count on this one."""
        return self.core.server.is_down(self._clock.now())

    def attach(self, worker: RequestWorker) -> None:
        self._worker = worker
        self._clock = worker.clock

    def beside(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._watch()]

    def note_arrived(self, request_ids: Sequence[str], now: float) -> None:
        """Do nothing: `run` is woken, and a running stream makes no room."""

    async def clear(self) -> list[Lease]:
        leases = self.core.held.release_all()
        self.core.decide(self._clock.now())  # forgets what is to be hung up: the tasks ended with the earlier loop
        return leases

    async def run(self) -> None:
        try:
            while not self._worker.is_over:
                self._worker.intake.changed.clear()
                if self._failed is not None:
                    raise self._failed
                await self._carry_out()
                with suppress(TimeoutError):
                    async with asyncio.timeout(RISK_CHECK_S if self.core.awaits_first_token else UPDATE_S):
                        await self._worker.intake.changed.wait()
        finally:
            tasks = [*self._streams.values(), *self._ending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self) -> None:
        now = self._clock.now()
        self._say_if_down(now)
        leases = self.core.give_back(now)
        self._worker.send(self.core.held.refuse(now))
        await self._release(leases)
        opened, hung_up = self.core.decide(now)
        for request_id in hung_up:
            self._hang_up(request_id)
        for request in opened:
            self._streams[request.seq_id] = asyncio.create_task(self._stream(request))
        if opened or not self._streams:
            self._worker.claimer.note_room()

    def _hang_up(self, request_id: str) -> None:
        task = self._streams.pop(request_id, None)
        if task is not None:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()

    async def _stream(self, request: StreamRequest) -> None:
        request_id, task, is_first = request.seq_id, asyncio.current_task(), True
        try:
            async with aclosing(self._upstream.stream(request)) as outputs:
                async for output in outputs:
                    self._worker.send(self.core.add_output(output, self._clock.now()))
                    if is_first:  # its prefill is done, so that another one may begin
                        self._worker.intake.changed.set()
                    is_first = False
        except UpstreamError as error:
            await self._end(request_id, error)
        except Exception as error:  # a bug must end the worker, and not only this stream
            self._failed = error
        finally:
            if self._streams.get(request_id) is task:
                del self._streams[request_id]
            self._worker.claimer.note_room()
            self._worker.intake.changed.set()

    async def _end(self, request_id: str, error: UpstreamError) -> None:
        now = self._clock.now()
        if self.core.server.is_reachable or not isinstance(error, UpstreamUnreachable):  # else it was said before
            log.warning("a stream of the upstream ended early", request=request_id, reason=str(error))
        if isinstance(error, UpstreamLost):
            self._stream_lost.set()
        report, leases = self.core.end_stream(request_id, error, now)
        self._worker.send(report)
        await self._release(leases)

    async def _release(self, leases: list[Lease]) -> None:
        """Put requests back into the queue. If the store refuses that now, they return when their leases end."""
        if leases:
            await self._worker.outage.attempt(self._worker.queue.release(leases))

    async def _watch(self) -> None:
        """Ask the server for its load once in a while and after lost streams, and notice that it is away or back."""
        while True:
            self._stream_lost.clear()
            await self._look()
            self._worker.intake.changed.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOAD_S):
                    await self._stream_lost.wait()

    async def _look(self) -> None:
        try:
            load = await self._upstream.load()
            if self.core.server.awaits_trial:
                await self._try_out()
        except UpstreamBusy:  # this tells neither that the server is away nor that it serves us again
            self.core.server.must_be_asked = False
        except UpstreamError as error:
            self.core.note_unreachable(error, self._clock.now())
        else:
            if not self._stream_lost.is_set():
                self.core.note_load(load, self._clock.now())

    async def _try_out(self) -> None:
        with suppress(UpstreamRefused):  # a server that judges a request serves us
            await self._upstream.try_out()

    def _say_if_down(self, now: float) -> None:
        is_down = self.core.server.is_down(now)
        if is_down and not self._was_down:
            hint = "requests go to other workers, or wait until it is back"
            log.error("the upstream does not serve", reason=self.core.server.reason, hint=hint)
        elif self._was_down and not is_down:
            log.info("the upstream is back")
            self._worker.claimer.note_room()
        self._was_down = is_down
