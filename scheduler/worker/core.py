"""What the parts of a worker need of the core that holds its requests, and of the driver that works on them.

There is a core and a driver for engines that take steps (`scheduler.drivers.steps`), and one for servers that plan
their own steps (`scheduler.drivers.streams`). Claims, leases, heartbeats and maintenance are the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from scheduler.config import Tier
from scheduler.control.knobs import Decision
from scheduler.holdings.status import CoreStatus
from scheduler.request import Claimed, Lease
from scheduler.request_state import RequestState


class WorkerCore(Protocol):
    """The requests of one worker, and the decisions about them, without I/O. `SchedulerCore` describes the methods."""

    tiers: tuple[Tier, ...]  # from the highest priority to the lowest

    @property
    def states(self) -> Iterable[RequestState]: ...

    @property
    def num_interactive(self) -> int: ...

    @property
    def is_step_in_flight(self) -> bool: ...

    def claim_limits(self, now: float) -> dict[str, int]: ...

    def accept(self, claimed: Sequence[Claimed], now: float, wall_ms: int) -> None: ...

    def cancel(self, request_ids: Iterable[str]) -> list[RequestState]: ...

    def release(self, request_ids: Iterable[str]) -> list[RequestState]: ...

    def can_continue(self, state: RequestState) -> bool: ...

    def release_all(self) -> list[Lease]: ...

    def review(self, depths: Mapping[str, int], now: float) -> list[Decision]: ...

    def status(self, now: float) -> CoreStatus: ...

    def explain(self, now: float) -> dict[str, Any]: ...


class Driver(Protocol):
    """The part of a worker's loop that works on the requests that the core holds. `StepLoop` is one."""

    @property
    def is_stuck(self) -> bool:
        """Whether the driver makes no progress, so that the worker must not look alive."""
        ...

    def drain(self) -> None:
        """Make `run` return when the worker holds no more requests."""
        ...

    def stop(self) -> None:
        """Make `run` return soon; unfinished requests stay in the core."""
        ...

    async def clear(self) -> list[Lease]:
        """Release all requests that an earlier loop has left in the core, and return their leases."""
        ...

    async def run(self) -> None: ...
