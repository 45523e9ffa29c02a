"""Tasks for tests."""

from itertools import count

from scheduler.tasks.task import Task

_numbers = count()


def make_task(input: bytes = b"1", tier: str = "realtime", arrival_ms: int = 1000, **changes: object) -> Task:
    values = {"id": f"task_{next(_numbers)}", "service_tier": "default", **changes}
    return Task(tier=tier, arrival_ms=arrival_ms, input=input, **values)  # type: ignore[arg-type]
