"""Isolation: which request kills its worker, among all that were in the worker's steps when it died.

A request whose attempts ended with its workers becomes a suspect before its last attempts (`retry.max_attempts`, a key
of its tier). In the last attempt but one, suspects start a few at a time, so that few of them can be blamed for the
next death. In its last attempt, a request is isolated: it runs alone in a step. Then only this request can be blamed.

Knows the request table; writes nothing, and does not know the store (`scheduler.drivers.steps.driver`).
"""

from collections.abc import Mapping

from engine.interface import StepPlan
from scheduler.holdings.request_table import RequestTable
from scheduler.request import Lease
from scheduler.request_state import RequestState, Status

COHORT = 8  # suspects that start in shared steps at the same time
# Output tokens after which a suspect counts as proven, and another one may start. A worker continues a request from its
# checkpoint, which is at most about so many tokens before the place at which the last worker died.
PROVEN_TOKENS = 128
SHARED_STEPS = 3  # shared steps between two steps of an isolated request, if there is other work


class Isolation:
    """The suspects among the requests that a worker holds. Most of the time, there are none."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._suspects: dict[str, RequestState] = {}
        self._num_shared = 0  # shared steps since the last step of an isolated request
        self._alone: RequestState | None = None  # the request that the newest plan runs alone

    def add(self, state: RequestState) -> None:
        """Add a claimed request, if it is a suspect."""
        if state.is_suspect:
            self._suspects[state.id] = state

    @property
    def has_suspects(self) -> bool:
        """Whether there are requests whose earlier attempts ended with their workers, so that they may be to blame."""
        return bool(self._suspects)

    def held_back(self) -> Mapping[str, RequestState]:
        """Return the requests that may not run in a shared step now."""
        if not self._suspects:
            return {}
        self._suspects = {i: s for i, s in self._suspects.items() if self._table.states.get(i) is s}
        shared = [s for s in self._suspects.values() if not s.is_isolated]
        num_unproven = sum(s.status is not Status.WAITING and s.num_new_tokens < PROVEN_TOKENS for s in shared)
        waiting = sorted((s for s in shared if s.status is Status.WAITING), key=lambda s: s.edf_key)
        isolated = {s.id: s for s in self._suspects.values() if s.is_isolated}
        return isolated | {s.id: s for s in waiting[max(0, COHORT - num_unproven) :]}

    def next_alone(self) -> RequestState | None:
        """Return the isolated request whose turn it is. A request that has begun keeps its turn to its end."""
        isolated = (s for s in self._suspects.values() if s.is_isolated and self._table.states.get(s.id) is s)
        return min(isolated, key=lambda s: (s.status is Status.WAITING, -s.priority, s.edf_key), default=None)

    @property
    def is_turn(self) -> bool:
        """Whether the next step is one of an isolated request, even if there is other work."""
        return self._num_shared >= SHARED_STEPS

    def note_plan(self, plan: StepPlan) -> None:
        """Record the newest plan: whether it runs an isolated request."""
        found = self._suspects.get(plan.run[0].seq_id) if len(plan.run) == 1 else None
        self._alone = found if found is not None and found.is_isolated else None
        self._num_shared = 0 if self._alone is not None else self._num_shared + 1

    def may_compile(self, state: RequestState) -> bool:
        """Return whether the grammar of a request may be compiled. A suspect waits until it may run."""
        return state is self.next_alone() or state.id not in self.held_back()

    def marks(self) -> tuple[dict[Lease, bool], Lease | None]:
        """Return of each suspect whether it waits, and the request that runs alone in the step of the newest plan.

        A suspect that waits is in no step, and its grammar is not being compiled.
        """
        held_back, turn = self.held_back(), self.next_alone()
        waits = {s.lease: self._is_waiting(s, s is turn or s.id not in held_back) for s in self._suspects.values()}
        return waits, None if self._alone is None else self._alone.lease

    def _is_waiting(self, state: RequestState, may_run: bool) -> bool:
        if state.awaits_grammar and may_run:
            return False
        return state is not self._alone if state.is_isolated else state.status is Status.WAITING
