"""Stores the output of bulk requests while it grows, so that another worker continues it if this one dies.

The output of a part of a job is also continued if its gateway dies, and the next one asks for the part again.

A write is one call for all requests together. It takes place every `CHECKPOINT_S` seconds at most, and holds at most
`MAX_TOKENS` tokens. Two kinds of requests are stored only when the worker ends:

- Interactive requests: their outputs are short.
- Requests whose tokens are sent after each step: their gateways have them (`scheduler.worker.claimer.Takeover`). Parts
  of jobs are stored nevertheless, for the next gateway.
"""

from collections.abc import Iterable, Iterator

from scheduler.clock import Clock
from scheduler.holdings.holdings import Holdings
from scheduler.queue.base import Queue
from scheduler.request import Checkpoint, Delivery, Lease
from scheduler.request_state import RequestState
from scheduler.store.outage import StoreOutage

CHECKPOINT_S = 2.0  # seconds between two writes; about what a worker's death costs in work
MIN_TOKENS = 32  # a request with fewer new tokens is left out: computing them again costs less than a second
MAX_TOKENS = 65_536  # of one write: 256 KiB, or 128 KiB a second; a single request may have more


class Checkpointer:
    def __init__(self, held: Holdings, queue: Queue, outage: StoreOutage, clock: Clock) -> None:
        self._held = held
        self._queue = queue
        self._outage = outage
        self._clock = clock
        self._stored: dict[Lease, int] = {}  # number of tokens that the store has, by lease

    async def run(self) -> None:
        """Write checkpoints until this task is cancelled. What the store refuses is written with the next one."""
        while True:
            await self._clock.sleep(CHECKPOINT_S)
            await self._outage.attempt(self._write(self._due()))

    async def save_all(self) -> None:
        """Store the whole output of all requests, because the worker is about to give them back."""
        states = [s for s in self._held.states if s.output_token_ids and self._held.can_continue(s)]
        await self._outage.attempt(self._write([self._checkpoint(state) for state in states]))

    async def save_parts(self, dropped: Iterable[RequestState]) -> None:
        """Store the output of dropped parts of jobs, whose leases are still held: another gateway may ask for them."""
        parts = [state for state in dropped if state.request.job_part and self._held.can_continue(state)]
        # As a whole, because `run` may be writing other tokens of them just now.
        await self._write([Checkpoint(state.lease, 0, tuple(state.output_token_ids)) for state in parts])

    def _due(self) -> list[Checkpoint]:
        """Return the checkpoints of the requests with the most new tokens, as many as one write may hold."""
        due: list[Checkpoint] = []
        num_tokens = 0
        for state in sorted(self._candidates(), key=self._num_stored_behind, reverse=True):
            checkpoint = self._checkpoint(state)
            if not due or num_tokens + len(checkpoint.token_ids) <= MAX_TOKENS:
                num_tokens += len(checkpoint.token_ids)
                due.append(checkpoint)
        return due

    def _candidates(self) -> Iterator[RequestState]:
        for state in self._held.states:
            is_whole = state.request.delivery is Delivery.AT_END or bool(state.request.job_part)
            is_stored = is_whole and not state.tier.is_interactive
            if is_stored and self._num_stored_behind(state) >= MIN_TOKENS and self._held.can_continue(state):
                yield state

    def _num_stored_behind(self, state: RequestState) -> int:
        return len(state.output_token_ids) - self._num_stored(state)

    def _num_stored(self, state: RequestState) -> int:
        num_stored = self._stored.get(state.lease, state.num_restored)
        return num_stored if num_stored <= len(state.output_token_ids) else 0  # it has begun again

    def _checkpoint(self, state: RequestState) -> Checkpoint:
        index = self._num_stored(state)
        return Checkpoint(state.lease, index, tuple(state.output_token_ids[index:]))

    async def _write(self, checkpoints: list[Checkpoint]) -> None:
        held = {state.lease for state in self._held.states}
        self._stored = {lease: count for lease, count in self._stored.items() if lease in held}
        written = [c for c in checkpoints if c.token_ids]
        for checkpoint, count in zip(written, await self._queue.checkpoint(written), strict=True):
            # After a lost or foreign checkpoint, the next one replaces it.
            is_whole = count == checkpoint.index + len(checkpoint.token_ids)
            self._stored[checkpoint.lease] = count if is_whole else 0
