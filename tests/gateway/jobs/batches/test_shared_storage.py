"""Batches on a storage that gateways share but not their disks, and what they do while it is away."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import fsspec
import httpx
import openai
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from gateway.files.object_storage import ObjectStorage
from gateway.files.storage import StorageUnreachable
from tests.gateway.files.s3 import BUCKET, Address, Way, s3_options, s3_server
from tests.gateway.jobs.batches.test_restart import assert_every_line_once
from tests.gateway.offline import OfflineGateway, jsonl, lines, make_gateway, running_gateway
from tests.waiting import until

COLLECT_S = 0.02


@pytest.fixture(scope="module")
def s3_address() -> Iterator[Address]:
    pytest.importorskip("s3fs")
    with s3_server() as address:
        yield address


@pytest.fixture
async def way(s3_address: Address, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Way]:
    async with Way(s3_address).serving() as way:
        monkeypatch.setitem(fsspec.config.conf, "s3", s3_options(way.address))
        yield way


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path, way: Way) -> AsyncIterator[OfflineGateway]:
    storage = ObjectStorage(f"s3://{BUCKET}/{secrets.token_hex(4)}", tmp_path)
    storage.collect_s = COLLECT_S
    async with running_gateway(redis_client, tmp_path, storage=storage) as gateway:
        yield gateway


@pytest.mark.full
@pytest.mark.timeout(120)
async def test_nothing_is_lost_when_s3_is_cut_off_in_mid_job(gateway: OfflineGateway, way: Way) -> None:
    completions = gateway.completions
    completions.permits, completions.statuses["q3"] = asyncio.Semaphore(10), [400]
    created = await gateway.submit(lines(40))
    await gateway.answered(created.id, 10)
    way.cut()
    for _ in range(30):
        completions.permits.release()
    await until(lambda: way.refused >= 3)
    batch = await gateway.client.batches.retrieve(created.id)
    assert batch.status == "in_progress" and batch.request_counts is not None
    assert batch.request_counts.completed + batch.request_counts.failed == 10, "what is not in S3 does not count"
    way.mend()
    await assert_every_line_once(gateway, created.id, 40)
    assert set(completions.calls.values()) == {1}


@pytest.mark.full
@pytest.mark.timeout(120)
async def test_requests_that_need_s3_are_told_to_come_back(gateway: OfflineGateway, way: Way) -> None:
    file_id = await gateway.upload(jsonl(lines(2)))
    way.cut()
    for attempt in (gateway.upload(b"{}"), gateway.create(file_id), gateway.client.files.content(file_id)):
        with pytest.raises(openai.InternalServerError, match="file storage is not reachable") as refused:
            await attempt
        assert refused.value.status_code == 503 and int(refused.value.response.headers["retry-after"]) >= 1
    assert [file.id async for file in gateway.client.files.list()] == [file_id]
    assert [batch.id async for batch in gateway.client.batches.list()] == []
    assert list(gateway.files.incoming.iterdir()) == []
    way.mend()
    assert (await gateway.ended((await gateway.create(file_id)).id)).status == "completed"


async def test_a_storage_that_is_away_is_asked_once_and_the_log_says_why(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call to a storage that hangs takes up to 20 s."""
    storage, calls = ObjectStorage(f"memory://{secrets.token_hex(4)}", tmp_path), 0

    async def denied(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        raise StorageUnreachable("the file storage does not answer: Access Denied")

    gateway = make_gateway(redis_client, tmp_path, storage=storage)
    async with gateway.http:
        file_id = await gateway.upload(jsonl(lines(2)))
        monkeypatch.setattr(ObjectStorage, "_call", denied)
        for attempt in (partial(gateway.create, file_id), partial(gateway.client.files.content, file_id)):
            calls = 0
            with capture_logs() as logged, pytest.raises(openai.InternalServerError, match="file storage is not reach"):
                await attempt()
            assert calls == 1
            assert [line["event"] for line in logged if "Access Denied" in line["event"]] != []


@pytest.mark.full
async def test_downloads_from_s3(gateway: OfflineGateway) -> None:
    content = bytes(range(256)) * 40_000  # more than one read
    file_id = await gateway.upload(content, "größe.bin", "user_data")
    path = f"/v1/files/{file_id}/content"
    whole = await gateway.http.get(path)
    assert whole.content == content and int(whole.headers["content-length"]) == len(content)
    assert "gr%C3%B6%C3%9Fe.bin" in whole.headers["content-disposition"]
    for wanted, start, stop in (
        ("bytes=0-0", 0, 1),
        ("bytes=5000000-", 5_000_000, len(content)),
        ("bytes=-10", len(content) - 10, len(content)),
        ("bytes=10-99999999", 10, len(content)),
    ):
        part = await gateway.http.get(path, headers={"range": wanted, "if-range": whole.headers["etag"]})
        assert (part.status_code, part.content) == (206, content[start:stop])
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(content)}"
    for wanted in ("bytes=0-1,5-6", "lines=1-2", "bytes=-", "bytes=9-2", f"bytes={'9' * 5000}-"):
        assert (await gateway.http.get(path, headers={"range": wanted})).content == content
    stale = await gateway.http.get(path, headers={"range": "bytes=0-0", "if-range": '"other"'})
    assert stale.content == content
    beyond = await gateway.http.get(path, headers={"range": f"bytes={len(content)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(content)}")
    empty = await gateway.upload(b"", "empty", "user_data")
    assert (await gateway.http.get(f"/v1/files/{empty}/content")).content == b""


@pytest.mark.full
async def test_a_damaged_file_is_not_sent_whole(gateway: OfflineGateway) -> None:
    file_id = await gateway.upload(b"right" * 2_000_000, "x.bin", "user_data")
    storage = gateway.files.storage
    assert isinstance(storage, ObjectStorage)
    await asyncio.to_thread(storage._files.pipe_file, storage._at(f"files/{file_id}"), b"wrong" * 2_000_000)
    received = 0
    with pytest.raises(httpx.RemoteProtocolError, match="mid-answer"):  # in a server, the connection ends here
        async with gateway.http.stream("GET", f"/v1/files/{file_id}/content") as response:
            async for chunk in response.aiter_raw():
                received += len(chunk)
    assert received < 10_000_000
