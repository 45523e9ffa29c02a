"""The /v1/tasks endpoints: items for workers with a static endpoint (`--engine static`).

Translates between HTTP and the task service. An API key sees only its own tasks.
"""

import hashlib
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from gateway.http.disconnect import CLIENT_CLOSED, ClientDisconnected, until_disconnect
from gateway.identity import resolve_tier
from gateway.jobs.tasks.model import MAX_INPUTS, CreateTasks, task_object
from gateway.jobs.tasks.service import MAX_RESULT_BYTES, TooLargeAnswer
from gateway.protocol import errors
from gateway.protocol.errors import ApiError, invalid_request, invalid_value
from gateway.protocol.json_body import parse, read_object
from gateway.protocol.openapi import json_body
from gateway.routes.chat import json_response
from gateway.routes.dependencies import Caller
from gateway.routes.jobs.files import Owner
from gateway.routes.jobs.idempotency import idempotency_key, once
from gateway.state import gateway_of
from scheduler.client.rejection import Rejected, RejectReason
from scheduler.tasks.queue import TooManyBytes
from scheduler.tasks.task import StoredTask

router = APIRouter(tags=["tasks"])

MAX_WAIT_S = 60.0
WaitS = Annotated[float, Query(ge=0, le=MAX_WAIT_S)]


@router.post("/v1/tasks", status_code=202, openapi_extra=json_body(CreateTasks))
async def create_tasks(request: Request, key: Caller, owner: Owner) -> Response:
    """Enqueue one task, or a list of tasks, and return them at once."""
    service, digest = gateway_of(request).tasks, hashlib.sha256()
    body = await read_object(request, partial(parse, CreateTasks), digest.update)
    resolved = resolve_tier(body.service_tier, key, gateway_of(request).tiers)
    may_exist = idempotency_key(request) is not None

    async def create(new_id: str) -> Response:
        created = await service.create(body, resolved, owner, new_id, may_exist=may_exist)
        if isinstance(created, Rejected):
            raise _refused(created)
        if isinstance(created, TooManyBytes):
            raise errors.task_quota_exceeded(created.held, created.limit)
        is_list = body.inputs is not None
        return json_response(_list(created, has_more=False) if is_list else task_object(created[0]), status=202)

    return await once(request, owner, digest.hexdigest(), create, status_code=202)


@router.get("/v1/tasks")
async def list_tasks(
    request: Request,
    owner: Owner,
    state: Literal["dead"] | None = None,
    ids: Annotated[str | None, Query(max_length=64 * MAX_INPUTS)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: str | None = None,
) -> Response:
    """List the tasks with these `ids`, or with `state=dead` the dead letters, the newest first."""
    service = gateway_of(request).tasks
    if ids is not None:
        wanted = [task_id for task_id in ids.split(",") if task_id]
        if len(wanted) > MAX_INPUTS:
            raise invalid_value("ids", f"Invalid value for 'ids': it must have at most {MAX_INPUTS} ids.")
        try:
            return json_response(_list(await service.get_all(wanted, owner), has_more=False))
        except TooLargeAnswer:
            limit = MAX_RESULT_BYTES // 2**20
            raise invalid_value("ids", f"The results of these tasks are over {limit} MB. Send fewer 'ids'.") from None
    if state is None:
        raise invalid_request("Say which tasks: 'state=dead', or 'ids' with commas.", "state")
    found = await service.dead(owner, limit + 1, after)
    if found is None:
        raise invalid_value("after", "Invalid value for 'after': there is no such dead letter.")
    return json_response(_list(found[:limit], has_more=len(found) > limit))


@router.get("/v1/tasks/{task_id}")
async def retrieve_task(request: Request, owner: Owner, task_id: str, wait_s: WaitS = 0.0) -> Response:
    """Return a task. With `wait_s`, wait up to so many seconds for its end."""
    service = gateway_of(request).tasks
    if not wait_s:
        return json_response(task_object(_existing(await service.get(task_id, owner), task_id)))
    try:
        async with until_disconnect(request.receive):
            found = await service.get(task_id, owner, wait_s)
    except ClientDisconnected:
        request.state.hung_up = True  # RequestContext in gateway/http/middleware.py reads this
        return Response(status_code=CLIENT_CLOSED)
    return json_response(task_object(_existing(found, task_id)))


@router.delete("/v1/tasks/{task_id}", name="delete_task")
@router.post("/v1/tasks/{task_id}/cancel")
async def cancel_task(request: Request, owner: Owner, task_id: str) -> Response:
    """Cancel a task that waits or runs. One that has ended stays as it is."""
    service = gateway_of(request).tasks
    found = _existing(await service.get(task_id, owner), task_id)
    return json_response(task_object(await service.cancel(found)))


@router.post("/v1/tasks/{task_id}/retry", status_code=202)
async def retry_task(request: Request, key: Caller, owner: Owner, task_id: str) -> Response:
    """Enqueue a dead letter again, with all its tries before it."""
    service, tiers = gateway_of(request).tasks, gateway_of(request).tiers
    found = _existing(await service.get(task_id, owner), task_id)
    if not found.task.is_readable:
        message = "This server cannot read the task: it is damaged, or only a later version of the server can retry it."
        raise ApiError(409, message, headers={"x-should-retry": "false"})
    tier = tiers.tiers.get(found.task.tier) or resolve_tier(found.task.service_tier, key, tiers).tier
    revived = await service.revive(found, tier)
    if isinstance(revived, TooManyBytes):
        raise errors.task_quota_exceeded(revived.held, revived.limit)
    if revived is None:
        message = f"Cannot retry a task with state '{found.state.value}': only dead letters can be retried."
        raise ApiError(409, message, headers={"x-should-retry": "false"})
    return json_response(task_object(revived), status=202)


def _refused(reason: Rejected) -> ApiError:
    """Return 503 with the time after which there is room again, in every tier."""
    code = "engine_overloaded" if reason.reason is RejectReason.NO_ENGINE else "server_overloaded"
    message = f"{reason.message} {reason.advice}"
    return ApiError(503, message, "server_error", code=code, headers=errors.retry_after(reason.retry_after_s))


def _existing(found: StoredTask | None, task_id: str) -> StoredTask:
    if found is None:
        message = f"No task found with id '{task_id[:200]}'. Results are kept for a limited time."
        raise ApiError(404, message, param="task_id")
    return found


def _list(found: list[StoredTask], has_more: bool) -> dict[str, Any]:
    return {"object": "list", "data": [task_object(stored) for stored in found], "has_more": has_more}
