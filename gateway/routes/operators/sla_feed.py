"""The live feed of the SLA controllers: the events of GET /admin/sla/stream.

One event is sent every `PERIOD_S` seconds. The store is read once in this time, however many clients watch, and not at
all without a watcher. If the store stops answering, each watcher gets one `error` event. `sla` events continue when the
store answers again.

The feed ends by itself when the gateway drains. sse-starlette also ends its responses at SIGTERM: on import it patches
`uvicorn.Server.handle_exit`. The patch works under a plain uvicorn. It has no effect under tidegate's own server
(tidegate/gateway/process.py), because that server handles signals without `handle_exit`. So
`AppStatus.disable_automatic_graceful_drain` need not be called. Token streams are not affected in either case, because
they are not sse-starlette responses (gateway/http/sse.py gives the reasons).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict
from typing import Any

import structlog
from sse_starlette import EventSourceResponse, JSONServerSentEvent
from starlette.types import Receive, Scope, Send

from gateway.protocol.errors import store_failed
from gateway.routes.ops import Shared
from gateway.state import STORE_TIMEOUT_S
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.queue.base import Backlog

log = structlog.get_logger(__name__)

PERIOD_S = 0.5  # seconds between two events; workers announce a new state about once a second
SEND_TIMEOUT_S = 5.0  # seconds for a client to accept an event after the socket's buffers are full; then it is cut off


async def explain(client: SchedulerClient, backlogs: Mapping[str, Backlog]) -> dict[str, Any]:
    """Return the explanation that each worker sent with its last heartbeat, and predicted TTFTs.

    A predicted TTFT is that of a short request. There is one for each tier that has a prediction.
    """
    explanations = await client.registry.sla()
    workers = [{"id": worker_id, **json.loads(text)} for worker_id, text in explanations.items()]
    return {"predicted_ttft_s": client.predicted_ttfts_s(backlogs), "workers": workers}


class SlaFeed:
    """The events about the SLA controllers' state, every `PERIOD_S` seconds for each watcher."""

    def __init__(self, client: SchedulerClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._is_away = False  # whether the last reading failed
        self._state = Shared(self._read, clock, PERIOD_S)

    async def events(self, may_watch: Callable[[], bool]) -> AsyncGenerator[JSONServerSentEvent, None]:
        """Yield the events for one watcher, until the gateway drains or the watcher may not watch any more.

        A slow watcher does not get every reading.
        """
        sent_ms: dict[str, int] = {}
        was_away = False
        while not self._client.is_draining and may_watch():
            state = await self._state.read()
            if state is not None:
                yield JSONServerSentEvent(_with_new_decisions(state, sent_ms), event="sla")
            elif not was_away:
                yield JSONServerSentEvent(store_failed().body(), event="error")
            was_away = state is None
            await self._clock.sleep(PERIOD_S)

    async def _read(self) -> dict[str, Any] | None:
        """Return the data of an event, or None if the store does not answer."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                backlogs = await self._client.backlogs()
                explained = await explain(self._client, backlogs)
        except Exception as error:  # each store adapter has its own errors
            if not self._is_away:
                log.warning("sla_feed_not_read", error=str(error) or type(error).__name__)
            self._is_away = True
            return None
        self._is_away = False
        waiting = {tier: asdict(backlog) for tier, backlog in backlogs.items()}
        return {"at_ms": self._clock.wall_ms(), "waiting": waiting, **explained}


def _with_new_decisions(state: dict[str, Any], sent_ms: dict[str, int]) -> dict[str, Any]:
    """Return `state` without the decisions that were already sent to the watcher.

    `sent_ms` maps each worker's id to the `at_ms` of the last explanation that was sent. The function updates it.
    """
    workers = []
    for worker in state["workers"]:
        at_ms = worker.get("at_ms", 0)
        new_s = (at_ms - sent_ms.get(worker["id"], 0)) / 1000
        sent_ms[worker["id"]] = at_ms
        decisions = [decision for decision in worker.get("decisions", []) if decision["ago_s"] < new_s]
        workers.append({**worker, "decisions": decisions})
    return {**state, "workers": workers}


class SlaStreamResponse(EventSourceResponse):
    """The response for a new watcher of `feed`. It ends without an error if the client hangs up or stops reading."""

    def __init__(self, feed: SlaFeed, may_watch: Callable[[], bool], send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        super().__init__(feed.events(may_watch), send_timeout=send_timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except OSError:  # the send timeout, or a server that reports a closed connection
            log.debug("a watcher of the SLA feed has gone")
