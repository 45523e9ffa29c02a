"""The worker registry: which workers are alive, what they can do, and their metrics.

Workers announce themselves every second or so; who stops announcing is gone a few seconds later. Gateways
read it for admission, `/ready`, `/v1/models` and `/metrics`.
"""

from typing import Protocol

from scheduler.request import WorkerStatus


class WorkerRegistry(Protocol):
    async def announce(self, status: WorkerStatus, metrics_text: str) -> None:
        """I am alive; `metrics_text` is Prometheus exposition text."""
        ...

    async def withdraw(self, worker_id: str) -> None:
        """I am leaving. Unknown ids are ignored."""
        ...

    async def workers(self) -> list[WorkerStatus]:
        """Those alive, by id."""
        ...

    async def metrics(self) -> dict[str, str]:
        """The last announced metrics of those alive, by worker id."""
        ...
