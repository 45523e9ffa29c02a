"""The decisions that a worker asks its driver's core for. There is one core for steps, and one for streams."""

from collections.abc import Mapping
from typing import Any, Protocol

from scheduler.control.knobs import Decision
from scheduler.holdings.holdings import Holdings
from scheduler.holdings.status import CoreStatus


class WorkerCore(Protocol):
    """What a driver decides, without I/O. Times are seconds of the worker's clock."""

    @property
    def held(self) -> Holdings: ...

    @property
    def is_busy(self) -> bool:
        """Whether work is under way, for whose end a new request would wait."""
        ...

    def claim_limits(self, now: float) -> dict[str, int]:
        """Return how many more requests of each tier to claim from the queue. The highest tier comes first."""
        ...

    def review(self, depths: Mapping[str, int], now: float) -> list[Decision]:
        """Boost urgent requests, let the controller move its knobs, and return the controller's decisions.

        `depths` is the number of requests in the queue, by tier. To be called twice a second.
        """
        ...

    def status(self, now: float) -> CoreStatus: ...

    def explain(self, now: float) -> dict[str, Any]:
        """Return the controller's state and its newest decisions with their reasons, as plain data."""
        ...
