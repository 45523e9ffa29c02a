"""Adds claimed requests to the requests that a worker holds, and removes cancelled and lost requests.

The step loop is woken after each change. The claimer, the publisher and the lease keeper share one `HeldRequests`.
"""

import asyncio
from collections.abc import Iterable, Sequence

from engine.interface import Engine
from scheduler.clock import Clock
from scheduler.planning.core import SchedulerCore
from scheduler.request import Claimed
from scheduler.worker.metrics import SchedulerMetrics


class HeldRequests:
    def __init__(self, core: SchedulerCore, engine: Engine, metrics: SchedulerMetrics, clock: Clock) -> None:
        self._core = core
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self.changed = asyncio.Event()  # set when the step loop should look at the requests again
        self.grammar_arrived = asyncio.Event()  # set when a request with a grammar was accepted

    def accept(self, claimed: Sequence[Claimed]) -> None:
        """Hand claimed requests to the core, and make room for them in the step in flight."""
        now = self._clock.now()
        self._core.accept(claimed, now, self._clock.wall_ms())
        if any(c.request.sampling.grammar is not None for c in claimed):
            self.grammar_arrived.set()
        self._make_room([c.request.id for c in claimed], now)

    def note_compiled(self, request_id: str, compiled_grammar: object) -> None:
        """Hand a compiled grammar to the core, and make room in the step in flight for the request that has it."""
        self._core.note_compiled(request_id, compiled_grammar)
        self._make_room([request_id], self._clock.now())

    def refuse_grammar(self, request_id: str, reason: str) -> None:
        """Refuse a request whose grammar does not compile."""
        self._core.refuse_grammar(request_id, reason)
        self.changed.set()

    def _make_room(self, request_ids: Sequence[str], now: float) -> None:
        """Evict bulk sequences from the step in flight, if this lets one of the requests start sooner and pays.

        Wake the step loop in any case.
        """
        evictees = self._core.evictees_for(request_ids, now)
        if evictees:
            self._engine.evict(evictees)
        self.changed.set()

    def drop(self, request_ids: Iterable[str]) -> None:
        """Cancel requests that no client waits for any more."""
        cancelled = self._core.cancel(request_ids)
        for state in cancelled:
            self._metrics.record_cancelled(state.tier.name)
        if cancelled:
            self.changed.set()

    def release(self, request_ids: Iterable[str]) -> None:
        """Remove requests whose leases this worker has lost."""
        if self._core.release(request_ids):
            self.changed.set()
