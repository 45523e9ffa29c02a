"""Batches from creation to end through the official client, on a real store."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import structlog
from redis.asyncio import Redis

from gateway.store_keys import GatewayKeys
from tests.gateway.offline import OfflineGateway, jsonl, line, lines, running_gateway
from tests.waiting import until

DAY_S = 86_400


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    async with running_gateway(redis_client, tmp_path, max_lines_in_flight=32) as gateway:
        yield gateway


def _input(count: int) -> bytes:
    return jsonl(lines(count))


async def test_a_batch_runs_to_its_end(gateway: OfflineGateway) -> None:
    file_id = await gateway.upload(_input(200))
    created = await gateway.create(file_id, metadata={"team": "tides"})
    assert (created.status, created.errors, created.output_file_id) == ("validating", None, None)
    assert created.expires_at == created.created_at + DAY_S

    batch = await gateway.ended(created.id)

    assert batch.status == "completed" and batch.model == "tide-1" and batch.metadata == {"team": "tides"}
    assert batch.request_counts is not None and batch.usage is not None
    assert batch.request_counts.model_dump() == {"total": 200, "completed": 200, "failed": 0}
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (600, 400, 1000)
    assert batch.usage.input_tokens_details.cached_tokens == 200
    stamps = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert sorted(s for s in stamps if s is not None) == list(stamps)
    assert (batch.failed_at, batch.expired_at, batch.cancelled_at, batch.error_file_id) == (None,) * 4
    output = await gateway.read(batch.output_file_id)
    assert [entry["custom_id"] for entry in output] == [f"q{n}" for n in range(200)]
    assert len({entry["id"] for entry in output}) == 200 and output[0]["id"].startswith("batch_req_")
    response = output[0]["response"]
    assert (output[0]["error"], response["status_code"]) == (None, 200)
    assert {entry["response"]["request_id"] for entry in output} == set(gateway.completions.request_ids)
    assert response["body"]["choices"][0]["message"]["content"] == "Re: q0"
    assert response["body"]["service_tier"] == "flex" and gateway.completions.tiers == {"batch"}
    file = await gateway.client.files.retrieve(batch.output_file_id or "")
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


async def _is_cleared_up(redis: Redis) -> bool:
    """Whether nothing is left to do for any batch."""
    return await redis.scard(GatewayKeys.of(redis).batches_unfinished) == 0


async def test_a_batch_that_is_over_can_be_deleted_and_its_files_stay(
    gateway: OfflineGateway, redis_client: Redis
) -> None:
    gateway.completions.permits = asyncio.Semaphore(0)
    running, first = await gateway.submit(lines(1)), await gateway.submit(lines(1))
    refused = await gateway.http.delete(f"/v1/batches/{running.id}")
    assert refused.status_code == 409 and "cancel" in refused.json()["error"]["message"]
    gateway.completions.permits.release()
    gateway.completions.permits.release()
    over = await gateway.ended(first.id)
    await gateway.ended(running.id)
    await until(lambda: _is_cleared_up(redis_client))
    deleted = await gateway.http.delete(f"/v1/batches/{first.id}")
    assert deleted.json() == {"id": first.id, "object": "batch", "deleted": True}
    for method in ("GET", "DELETE"):
        assert (await gateway.http.request(method, f"/v1/batches/{first.id}")).status_code == 404
    assert [batch.id async for batch in gateway.client.batches.list()] == [running.id]
    assert [batch.id async for batch in gateway.client.batches.list(after=first.id)] == [running.id]
    assert len(await gateway.read(over.output_file_id)) == 1


async def test_records_of_ended_batches_and_their_inputs_expire(gateway: OfflineGateway, redis_client: Redis) -> None:
    ended = await gateway.ended((await gateway.submit(lines(2))).id)
    await until(lambda: _is_cleared_up(redis_client))
    gateway.clock.shift_s = 31 * DAY_S
    await gateway.batches.remove_ended()
    assert [batch.id async for batch in gateway.client.batches.list()] == []
    assert [file.id async for file in gateway.client.files.list()] == [ended.output_file_id]
    keys = GatewayKeys.of(redis_client)
    assert not await redis_client.exists(keys.batches_ended, keys.batch(ended.id))
    assert sum((await gateway.batches.counts_by_status()).values()) == 0


async def test_records_that_an_older_version_has_left_expire_as_if_they_had_ended_now(
    gateway: OfflineGateway, redis_client: Redis
) -> None:
    ended = [await gateway.ended((await gateway.submit(lines(1))).id) for _ in range(3)]
    await until(lambda: _is_cleared_up(redis_client))
    gateway.completions.permits = asyncio.Semaphore(0)
    running = await gateway.submit(lines(1))
    await redis_client.delete(GatewayKeys.of(redis_client).batches_ended)
    gateway.clock.shift_s = DAY_S // 2
    met_s = gateway.clock.wall_ms() // 1000
    await gateway.batches.remove_ended()
    dated = await redis_client.zrange(GatewayKeys.of(redis_client).batches_ended, 0, -1, withscores=True)
    assert {name.decode() for name, _ in dated} == {batch.id for batch in ended}
    assert all(end_s >= met_s for _, end_s in dated)
    gateway.clock.shift_s += 31 * DAY_S
    await gateway.batches.remove_ended()
    assert [batch.id async for batch in gateway.client.batches.list()] == [running.id]


async def test_cancel_keeps_what_is_finished(gateway: OfflineGateway) -> None:
    gateway.completions.permits = asyncio.Semaphore(3)
    created = await gateway.submit(lines(50))
    await gateway.answered(created.id, 3)
    await until(lambda: gateway.completions.running == 32)

    cancelling = await gateway.client.batches.cancel(created.id)
    assert cancelling.status == "cancelling" and cancelling.cancelling_at is not None
    batch = await gateway.ended(created.id)

    assert gateway.completions.running == 0, "the generations were cancelled"
    assert batch.status == "cancelled" and batch.cancelled_at is not None and batch.finalizing_at is None
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 50, "completed": 3, "failed": 0}
    kept = [e["custom_id"] for e in await gateway.read(batch.output_file_id)]
    unfinished = await gateway.read(batch.error_file_id)
    assert len(kept) == 3
    assert sorted(kept + [e["custom_id"] for e in unfinished]) == sorted(f"q{n}" for n in range(50))
    assert {(e["response"], e["error"]["code"]) for e in unfinished} == {(None, "batch_cancelled")}
    assert (await gateway.client.batches.cancel(created.id)).status == "cancelled"


async def test_a_batch_that_is_over_cannot_be_cancelled(gateway: OfflineGateway) -> None:
    batch = await gateway.ended((await gateway.submit(lines(1))).id)
    with pytest.raises(openai.ConflictError) as conflict:
        await gateway.client.batches.cancel(batch.id)
    assert conflict.value.body["message"] == "Cannot cancel a batch with status 'completed'."  # type: ignore[index]
    assert conflict.value.response.headers["x-should-retry"] == "false"


async def test_the_window_passes(gateway: OfflineGateway) -> None:
    gateway.completions.permits = asyncio.Semaphore(2)
    created = await gateway.submit(lines(10))
    await gateway.answered(created.id, 2)
    gateway.clock.shift_s = DAY_S
    batch = await gateway.ended(created.id)
    assert batch.status == "expired" and batch.expired_at is not None and batch.expires_at is not None
    assert batch.expired_at >= batch.expires_at
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 10, "completed": 2, "failed": 0}
    assert len(await gateway.read(batch.output_file_id)) == 2
    unfinished = await gateway.read(batch.error_file_id)
    assert len(unfinished) == 8
    assert unfinished[0]["error"] == {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }


async def test_lists_page_from_the_newest(gateway: OfflineGateway) -> None:
    created = [(await gateway.submit([line(f"x{n}")])).id for n in range(5)]
    assert [b.id async for b in gateway.client.batches.list(limit=2)] == created[::-1]
    first = await gateway.client.batches.list(limit=2)
    assert first.has_more and [b.id for b in first.data] == created[:2:-1]
    for batch_id in created:
        await gateway.ended(batch_id)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        *(({"completion_window": window}, "completion_window") for window in ("1y", "30s", "31d", "soon", 24)),
        ({"input_file_id": 7}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": "file-unknown"}, "input_file_id"),
        ({"input_file_id": "f" * 100_000}, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
    ],
)
async def test_bad_parameters_are_refused_at_once(
    gateway: OfflineGateway, change: dict[str, object], param: str
) -> None:
    body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"} | change
    answer = await gateway.http.post("/v1/batches", json={k: v for k, v in body.items() if v is not None})
    assert answer.status_code == 400 and len(answer.content) < 500, "what is wrong is not repeated"
    assert answer.json()["error"]["param"] == param
    assert [b async for b in gateway.client.batches.list()] == []


async def test_logs_of_a_batch_carry_its_id_and_not_the_creating_requests(gateway: OfflineGateway) -> None:
    file_id = await gateway.upload(_input(3))
    with structlog.contextvars.bound_contextvars(request_id="req_of_the_post", key="team"):
        created = await gateway.create(file_id)
    await gateway.ended(created.id)
    expected = [{"batch_id": created.id, "tier": "batch", "request_id": i} for i in gateway.completions.request_ids]
    assert gateway.completions.log_contexts == expected and len(expected) == 3


async def test_only_batch_files_are_inputs(gateway: OfflineGateway) -> None:
    file_id = await gateway.upload(b"{}", "data.jsonl", "user_data")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await gateway.create(file_id)


@pytest.mark.parametrize("name", ["batch_none", "batch_none:results", "..%2F..%2Fetc"])
async def test_unknown_batches(gateway: OfflineGateway, name: str) -> None:
    assert (await gateway.http.get(f"/v1/batches/{name}")).status_code == 404
    assert (await gateway.http.post(f"/v1/batches/{name}/cancel")).status_code == 404
    assert (await gateway.http.get("/v1/batches", params={"after": name})).status_code == 400
