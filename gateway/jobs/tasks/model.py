"""The bodies of /v1/tasks: what a client sends, and the task object that it gets."""

from typing import Any, Self

import msgspec
from pydantic import Field, model_validator

from gateway.protocol.bodies.options import Metadata
from gateway.protocol.json_body import Body
from scheduler.tasks.task import StoredTask, TaskState

MAX_INPUTS = 1000  # items of one call
MAX_TIMEOUT_S = 7 * 86_400


class CreateTasks(Body):
    """One item as `input`, or a list of items as `inputs`."""

    input: Any = None
    inputs: list[Any] | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    service_tier: str | None = None
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _has_items_once(self) -> Self:
        if ("input" in self.model_fields_set) == (self.inputs is not None):
            raise ValueError("Send either 'input' with one item or 'inputs' with a list of items.")
        return self

    @property
    def items(self) -> list[Any]:
        return [self.input] if self.inputs is None else self.inputs


def task_object(stored: StoredTask) -> dict[str, Any]:
    """Return the task as clients see it. `result` is the JSON of the endpoint, unread."""
    task = stored.task
    return {
        "id": task.id,
        "object": "task",
        "state": stored.state.value,
        "created_at": task.arrival_ms // 1000,
        "ended_at": None if stored.ended_ms is None else stored.ended_ms // 1000,
        "service_tier": task.service_tier,
        "timeout_s": None if task.timeout_ms is None else task.timeout_ms / 1000,
        "attempts": stored.attempts,
        "result": None if stored.result is None else msgspec.Raw(stored.result),
        "error": _error(stored),
        "metadata": task.metadata,
    }


def _error(stored: StoredTask) -> dict[str, Any] | None:
    if stored.state is not TaskState.DEAD:
        return None
    return {"message": stored.error, "failures": list(stored.task.failures)}
