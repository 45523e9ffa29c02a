"""The worker registry: which workers are alive, what they can do, their metrics, and what their controllers do.

Workers announce themselves every second or so; who stops announcing is gone a few seconds later. Gateways
read it for admission, `/ready`, `/v1/models`, `/metrics` and `/admin/sla`.
"""

from typing import Protocol

from scheduler.registry.worker_status import WorkerStatus


class WorkerRegistry(Protocol):
    async def announce(self, status: WorkerStatus, metrics_text: str, sla_json: str = "{}") -> None:
        """I am alive. `metrics_text`: Prometheus exposition text; `sla_json`: what the controller does and why."""
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

    async def sla(self) -> dict[str, str]:
        """What their controllers said last, as JSON objects, by worker id."""
        ...
