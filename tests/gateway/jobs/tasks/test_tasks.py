"""/v1/tasks through a real gateway, on a real store, with the real batch loop and an endpoint of the test."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from engine.static.function_endpoint import FunctionEndpoint
from gateway.identity import Keyring
from gateway.jobs.idempotency.store import IdempotencyStore
from gateway.jobs.tasks import service
from gateway.jobs.tasks.model import MAX_INPUTS
from gateway.store_keys import GatewayKeys
from scheduler.clock import SystemClock
from scheduler.config import TierSet
from scheduler.drivers.calls.driver import build_call_loop
from scheduler.drivers.calls.metrics import TaskMetrics
from scheduler.drivers.calls.policy import BatchPolicy
from scheduler.registry.worker_status import WorkerStatus
from scheduler.store.keys import Keys
from scheduler.tasks.queue import TaskQueue
from scheduler.tasks.task import VERSION
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import WorkerLoop
from tests.gateway.api_keys import as_
from tests.gateway.offline import keyring
from tests.gateway.stand import Bytes, Stand, make_tiers, running_stand
from tests.waiting import until

BATCH = 4
QUEUE_LIMIT = 200
TASK_WORKER = WorkerStatus("w2", (), 0, 0, 0, batch_items=BATCH)


def lengths(items: list[Any]) -> list[Any]:
    return [ValueError("it is no text") if not isinstance(item, str) else {"length": len(item)} for item in items]


@asynccontextmanager
async def running_gateway(
    redis: Redis, keys: Keyring | None = None, tiers: TierSet | None = None, **options: Any
) -> AsyncIterator[Stand]:
    """Run a gateway that has seen a worker for tasks."""
    async with running_stand(redis=redis, keyring=keys, tiers=tiers, workers=[TASK_WORKER], **options) as stand:
        yield stand


@pytest.fixture
async def stand(redis_client: Redis) -> AsyncIterator[Stand]:
    async with running_gateway(redis_client) as stand:
        yield stand


@pytest.fixture
async def worker(stand: Stand, redis_client: Redis) -> AsyncIterator[WorkerLoop]:
    async with serving(stand, redis_client) as loop:
        yield loop


@asynccontextmanager
async def serving(stand: Stand, redis: Redis) -> AsyncIterator[WorkerLoop]:
    """Run a worker whose endpoint measures texts."""
    clock, tiers = SystemClock(), stand.gateway.tiers
    queue, metrics = TaskQueue(redis, clock, "w2"), TaskMetrics(CollectorRegistry(), tiers)
    endpoint = FunctionEndpoint("python:lengths", lengths, BATCH, timeout_s=30.0)
    policy, identity = BatchPolicy(tiers, BATCH, clock.now()), WorkerIdentity("w2", (), clock.wall_ms())
    loop = build_call_loop(endpoint, policy, queue, stand.worker.registry, metrics, clock, identity)
    running = asyncio.create_task(loop.run())
    yield loop
    loop.drain()
    await running


async def create(stand: Stand, **body: Any) -> dict[str, Any]:
    answer = await stand.post("/v1/tasks", body)
    assert answer.status_code == 202, answer.text
    created: dict[str, Any] = answer.json()
    return created


async def get(stand: Stand, task_id: str, wait_s: float = 0, **kwargs: Any) -> dict[str, Any]:
    answer = await stand.http.get(f"/v1/tasks/{task_id}", params={"wait_s": wait_s} if wait_s else None, **kwargs)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_task_is_created_and_its_result_waited_for(stand: Stand, worker: WorkerLoop) -> None:
    created = await create(stand, input="tide", metadata={"run": "7"})
    assert created["id"].startswith("task_") and created["object"] == "task"
    assert (created["state"], created["service_tier"], created["result"]) == ("queued", "default", None)
    done = await get(stand, created["id"], wait_s=30)
    assert (done["state"], done["result"], done["error"], done["attempts"]) == ("done", {"length": 4}, None, 1)
    assert done["metadata"] == {"run": "7"}
    assert done["ended_at"] >= done["created_at"] == created["created_at"]
    assert await get(stand, created["id"]) == done


async def test_a_list_of_items_becomes_tasks_in_its_order(stand: Stand, worker: WorkerLoop) -> None:
    created = await create(stand, inputs=["a" * n for n in range(10)], service_tier="flex")
    ids = [task["id"] for task in created["data"]]
    for task_id in ids:
        await get(stand, task_id, wait_s=30)
    listed = (await stand.http.get("/v1/tasks", params={"ids": ",".join([*ids, "task_unknown", *ids])})).json()
    assert [task["result"]["length"] for task in listed["data"]] == list(range(10))
    assert {task["service_tier"] for task in listed["data"]} == {"flex"}


async def test_waiting_ends_with_the_state_of_then(stand: Stand) -> None:
    created = await create(stand, input="nobody serves this")
    assert (await get(stand, created["id"], wait_s=0.05))["state"] == "queued"


async def test_a_client_that_hangs_up_ends_its_wait(stand: Stand) -> None:
    created = await create(stand, input="x")
    tasks = stand.gateway.tasks
    waiting = asyncio.create_task(get(stand, created["id"], wait_s=60))
    await until(lambda: bool(tasks._ends._watched))
    waiting.cancel()
    await until(lambda: not tasks._ends._watched)


async def test_a_dead_letter_says_why_and_can_be_retried(stand: Stand, worker: WorkerLoop) -> None:
    created = await create(stand, input=None)  # a null is an item, too
    dead = await get(stand, created["id"], wait_s=30)
    reason = "ValueError: it is no text"
    assert (dead["state"], dead["attempts"], dead["result"]) == ("dead", 3, None)
    assert dead["error"] == {"message": reason, "failures": [reason] * 3}
    listed = (await stand.http.get("/v1/tasks?state=dead")).json()
    assert [task["id"] for task in listed["data"]] == [created["id"]]
    assert (await stand.http.get(f"/v1/tasks?state=dead&after={created['id']}")).json()["data"] == []
    retried = await stand.post(f"/v1/tasks/{created['id']}/retry", {})
    assert retried.status_code == 202 and retried.json()["state"] in ("queued", "running")
    assert (await get(stand, created["id"], wait_s=30))["attempts"] == 3


async def test_only_dead_letters_can_be_retried(stand: Stand) -> None:
    created = await create(stand, input="x")
    answer = await stand.post(f"/v1/tasks/{created['id']}/retry", {})
    assert answer.status_code == 409 and "queued" in answer.json()["error"]["message"]


async def test_a_task_of_a_later_version_is_not_retried_by_this_one(stand: Stand, redis_client: Redis) -> None:
    created = await create(stand, input="x")
    key = f"{GatewayKeys.of(redis_client).prefix}tasks:request:{created['id']}"
    fields = msgspec.msgpack.decode(await redis_client.hget(key, "payload") or b"")
    await redis_client.hset(key, "payload", msgspec.msgpack.encode({**fields, "version": VERSION + 1}))
    await TaskQueue(redis_client, SystemClock(), "old").claim({fields["tier"]: 1}, 5)
    assert "version" in (await get(stand, created["id"]))["error"]["message"]
    answer = await stand.post(f"/v1/tasks/{created['id']}/retry", {})
    assert answer.status_code == 409 and "later version" in answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["DELETE", "POST"])
async def test_a_task_can_be_cancelled_once(stand: Stand, method: str) -> None:
    path = f"/v1/tasks/{(await create(stand, input='x'))['id']}"
    for _ in range(2):
        answer = await stand.http.request(method, path if method == "DELETE" else f"{path}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")


async def test_a_key_sees_only_its_own_tasks(redis_client: Redis) -> None:
    async with running_gateway(redis_client, keyring(ann=None, ben=None)) as stand:
        ann, ben = (as_(name) for name in ("ann", "ben"))
        created = (await stand.post("/v1/tasks", {"input": 1}, headers=ann)).json()
        path = f"/v1/tasks/{created['id']}"
        assert (await stand.http.get(path, headers=ann)).status_code == 200
        requests = (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel"), ("POST", f"{path}/retry"))
        answers = [await stand.http.request(method, url, headers=ben) for method, url in requests]
        assert [answer.status_code for answer in answers] == [404] * 4
        listed = await stand.http.get(f"/v1/tasks?ids={created['id']}", headers=ben)
        assert listed.json()["data"] == []
        assert (await stand.http.get(path)).status_code == 401


@pytest.mark.parametrize("service_tier", ["default", "flex"])
async def test_503_begins_at_90_percent_of_the_queue(redis_client: Redis, service_tier: str) -> None:
    limits = {"queue_limit": QUEUE_LIMIT}
    async with running_gateway(redis_client, tiers=make_tiers(realtime=limits, bulk=limits)) as stand:
        accepted = 0
        while (answer := await _post_one(stand, service_tier)).status_code == 202:
            accepted += 1
        assert 0.88 * QUEUE_LIMIT <= accepted <= 0.92 * QUEUE_LIMIT
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert str(accepted) in answer.json()["error"]["message"]
        async with serving(stand, redis_client):
            await until(lambda: _is_accepted(stand, service_tier))


async def _has_state(stand: Stand, task_id: str, state: str) -> bool:
    return bool((await get(stand, task_id))["state"] == state)


async def _post_one(stand: Stand, service_tier: str) -> httpx.Response:
    return await stand.post("/v1/tasks", {"input": "x", "service_tier": service_tier})


async def _is_accepted(stand: Stand, service_tier: str) -> bool:
    return (await _post_one(stand, service_tier)).status_code == 202


async def test_a_key_that_holds_too_many_bytes_is_told_and_others_go_on(redis_client: Redis) -> None:
    async with running_gateway(redis_client, keyring(ann=None, ben=None), store_mb=Bytes(4 * 3000)) as stand:
        ann, ben = (as_(name) for name in ("ann", "ben"))
        first = await stand.post("/v1/tasks", {"input": "x" * 2000}, headers=ann)
        refused = await stand.post("/v1/tasks", {"input": "x" * 2000}, headers=ann)
        assert (first.status_code, refused.status_code) == (202, 429), refused.text
        assert refused.json()["error"]["code"] == "rate_limit_exceeded" and refused.headers["retry-after"]
        assert (await stand.post("/v1/tasks", {"input": "x" * 2000}, headers=ben)).status_code == 202
        await stand.http.delete(f"/v1/tasks/{first.json()['id']}", headers=ann)
        assert (await stand.post("/v1/tasks", {"input": "x" * 2000}, headers=ann)).status_code == 202


async def test_a_dead_letter_is_not_retried_beyond_the_bytes_of_its_key(redis_client: Redis) -> None:
    async with running_gateway(redis_client, store_mb=Bytes(4 * 3000)) as stand:
        created = await create(stand, input="x" * 2000, timeout_s=0.001)
        await until(lambda: _has_state(stand, created["id"], "dead"))
        await create(stand, input="x" * 2000)
        assert (await stand.post(f"/v1/tasks/{created['id']}/retry", {})).status_code == 429


async def test_results_that_are_too_large_together_are_asked_for_one_by_one(
    stand: Stand, worker: WorkerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = await create(stand, inputs=["a", "b"])
    ids = [task["id"] for task in created["data"]]
    done = [await get(stand, task_id, wait_s=30) for task_id in ids]
    size = len(json.dumps(done[0]["result"], separators=(",", ":")))
    monkeypatch.setattr(service, "MAX_RESULT_BYTES", size)
    answers = [await stand.http.get("/v1/tasks", params={"ids": wanted}) for wanted in (",".join(ids), *ids)]
    assert [answer.status_code for answer in answers] == [400, 200, 200]
    assert answers[0].json()["error"]["param"] == "ids"


async def test_without_a_worker_for_tasks_none_are_accepted(redis_client: Redis) -> None:
    async with running_gateway(redis_client) as stand:
        await stand.worker.registry.withdraw("w2")
        stand.gateway.client.live.endpoints.clear()
        stand.gateway.client.live._endpoint_seen_s = None
        answer = await stand.post("/v1/tasks", {"input": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_overloaded")
    assert "--engine static" in answer.json()["error"]["message"] and "retry-after" in answer.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"input": 1, "inputs": [1]}, None),
        ({"inputs": []}, "inputs"),
        ({"inputs": 3}, "inputs"),
        ({"inputs": [0] * (MAX_INPUTS + 1)}, "inputs"),
        ({"input": 1, "service_tier": "turbo"}, "service_tier"),
        ({"input": 1, "metadata": {"a": 1}}, "metadata.a"),
        *(({"input": 1, "timeout_s": timeout_s}, "timeout_s") for timeout_s in (0, -1, 604_801, "soon")),
    ],
)
async def test_bodies_that_are_refused(stand: Stand, body: dict[str, Any], param: str | None) -> None:
    answer = await stand.post("/v1/tasks", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("", 400, "state"),
        ("?state=done", 400, "state"),
        ("?state=dead&after=task_x", 400, "after"),
        ("?state=dead&limit=0", 400, "limit"),
        (f"?ids={','.join('t' * (MAX_INPUTS + 1))}", 400, "ids"),
        ("/task_x?wait_s=1000", 400, "wait_s"),
        ("/task_x", 404, "task_id"),
    ],
)
async def test_questions_that_are_refused(stand: Stand, query: str, status: int, param: str) -> None:
    answer = await stand.http.get(f"/v1/tasks{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


# -- timeouts ----------------------------------------------------------------------------------------------------------


async def test_a_task_that_waits_longer_than_its_timeout_becomes_a_dead_letter(stand: Stand) -> None:
    """Nobody serves it. Who waits for its end gets it."""
    created = await create(stand, input="x", timeout_s=0.2)
    assert created["timeout_s"] == 0.2
    dead = await get(stand, created["id"], wait_s=30)
    assert (dead["state"], dead["attempts"], dead["result"]) == ("dead", 0, None)
    assert dead["error"] == {"message": "It waited longer than its timeout of 0.2 s.", "failures": []}
    listed = (await stand.http.get("/v1/tasks?state=dead")).json()
    assert [task["id"] for task in listed["data"]] == [created["id"]]


# -- repetitions -------------------------------------------------------------------------------------------------------

KEY = {"Idempotency-Key": "one"}


@pytest.mark.parametrize("body", [{"input": "x"}, {"inputs": ["x", "y"]}])
async def test_a_repeated_creation_makes_no_second_tasks(
    stand: Stand, redis_client: Redis, body: dict[str, Any]
) -> None:
    first, second = [await stand.post("/v1/tasks", body, headers=KEY) for _ in range(2)]
    assert first.status_code == second.status_code == 202
    assert first.json() == second.json()
    assert second.headers["idempotent-replayed"] == "true" and "idempotent-replayed" not in first.headers
    assert await redis_client.zcard(Keys.of(redis_client).tasks.queue + "realtime") == len(ids_of(first))
    other = await stand.post("/v1/tasks", {"input": "another"}, headers=KEY)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize("body", [{"input": "x"}, {"inputs": ["x", "y"]}])
async def test_tasks_that_were_created_before_a_crash_are_found_again_even_if_they_have_ended(
    stand: Stand, worker: WorkerLoop, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    """The gateway dies after the tasks are there and before its answer is kept, and its lease ends."""

    async def lost(*_: Any) -> None:
        pass

    with monkeypatch.context() as crash:
        crash.setattr(IdempotencyStore, "_end", lost)
        crash.setattr(IdempotencyStore, "_lease_ms", lambda _: 0)
        first = await stand.post("/v1/tasks", body, headers=KEY)
    for task_id in ids_of(first):
        assert (await get(stand, task_id, wait_s=30))["state"] == "done"
    again = await stand.post("/v1/tasks", body, headers=KEY)
    assert again.status_code == 202 and "idempotent-replayed" not in again.headers
    assert ids_of(again) == ids_of(first)
    assert {task["state"] for task in again.json().get("data", [again.json()])} == {"done"}


def ids_of(answer: httpx.Response) -> list[str]:
    created = answer.json()
    return [task["id"] for task in created.get("data", [created])]
