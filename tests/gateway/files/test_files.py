"""Files through the official client, on a real store."""

import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from gateway.files.object_storage import ObjectStorage
from gateway.store_keys import GatewayKeys
from tests.gateway.offline import OfflineGateway, make_gateway


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    gateway = make_gateway(redis_client, tmp_path)
    yield gateway
    await gateway.http.aclose()


def on_disk(gateway: OfflineGateway) -> set[str]:
    return {p.name for name in ("files", "incoming") for p in (gateway.files.data_dir / name).iterdir()}


async def test_a_file_comes_back_as_it_was(gateway: OfflineGateway) -> None:
    content = os.urandom(300_000) + b"\r\n--boundary\r\n\n"
    file = await gateway.client.files.create(file=("größe.bin", content), purpose="user_data")
    assert (file.bytes, file.purpose, file.status) == (len(content), "user_data", "processed")
    assert file.filename == "größe.bin" and file.expires_at is None and file.id.startswith("file-")
    assert await gateway.client.files.retrieve(file.id) == file
    assert (await gateway.client.files.content(file.id)).content == content
    async with gateway.client.files.with_streaming_response.content(file.id) as response:
        assert b"".join([chunk async for chunk in response.iter_bytes()]) == content
        assert response.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("../../.bashrc", 'filename=".bashrc"'),
        ("..\\..\\run.bat", 'filename="run.bat"'),
        ("C:run.bat", 'filename="run.bat"'),
        ("/etc/größe", "filename*=utf-8''gr%C3%B6%C3%9Fe"),
        ("a/..", 'filename="{id}"'),
        ("x; filename=y", "filename*=utf-8''x%3B%20filename%3Dy"),
    ],
)
async def test_a_download_names_no_folder_and_is_no_page(gateway: OfflineGateway, name: str, saved: str) -> None:
    file_id = await gateway.upload(b"<script>", name, "user_data")
    answer = await gateway.http.get(f"/v1/files/{file_id}/content")
    assert answer.headers["content-disposition"] == f"attachment; {saved.format(id=file_id)}"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(("wanted", "first"), [("bytes=7-", 7), ("bytes=-3", 17)])
async def test_a_download_goes_on_where_it_was_cut_off(gateway: OfflineGateway, wanted: str, first: int) -> None:
    content = bytes(range(20))
    path = f"/v1/files/{await gateway.upload(content)}/content"
    rest = await gateway.http.get(path, headers={"range": wanted})
    assert (rest.status_code, rest.content) == (206, content[first:])
    assert rest.headers["content-range"] == f"bytes {first}-19/20"
    assert (await gateway.http.get(path, headers={"range": "bytes=20-"})).status_code == 416


@pytest.mark.parametrize("is_remote", [False, True], ids=["disk", "object store"])
async def test_head_says_what_a_download_would_be(redis_client: Redis, tmp_path: Path, is_remote: bool) -> None:
    storage = ObjectStorage(f"memory://{secrets.token_hex(4)}", tmp_path) if is_remote else None
    gateway = make_gateway(redis_client, tmp_path, storage=storage)
    async with gateway.http:
        path = f"/v1/files/{await gateway.upload(b'0123456789')}/content"
        for wanted in ({}, {"range": "bytes=7-"}, {"range": "bytes=10-"}):
            got, head = [await gateway.http.request(m, path, headers=wanted) for m in ("GET", "HEAD")]
            assert (head.status_code, head.content) == (got.status_code, b"")
            names = ("content-length", "content-type", "content-range", "etag", "accept-ranges", "content-disposition")
            assert [head.headers.get(name) for name in names] == [got.headers.get(name) for name in names]
        assert (await gateway.http.head("/v1/files/file-none/content")).status_code == 404


@pytest.mark.parametrize(
    "wanted", ["bytes=0-1,5-6", "lines=1-2", "bytes=-", "bytes=9-2", "bytes", f"bytes={'9' * 5000}-"]
)
async def test_a_range_that_is_not_read_gets_the_whole_content(gateway: OfflineGateway, wanted: str) -> None:
    path = f"/v1/files/{await gateway.upload(b'0123456789')}/content"
    answer = await gateway.http.get(path, headers={"range": wanted})
    assert (answer.status_code, answer.content) == (200, b"0123456789")


async def test_delete(gateway: OfflineGateway) -> None:
    file_id = await gateway.upload(b"x")
    deleted = await gateway.client.files.delete(file_id)
    assert deleted.model_dump() == {"id": file_id, "deleted": True, "object": "file"}
    assert on_disk(gateway) == set()
    for ask in (gateway.client.files.retrieve, gateway.client.files.content, gateway.client.files.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            await ask(file_id)
        assert missing.value.param == "id"
        assert str(file_id) in str(missing.value) and "No such File object" in str(missing.value)


@pytest.mark.parametrize("name", ["file-1:was_at", "..%2F..%2Fetc%2Fpasswd", "%00", "s", "x" * 5000])
async def test_strange_ids_are_unknown(gateway: OfflineGateway, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
        assert (await gateway.http.get(path)).status_code == 404
    assert (await gateway.http.delete(f"/v1/files/{name}")).status_code == 404


async def test_expiry(gateway: OfflineGateway, redis_client: Redis) -> None:
    file = await gateway.client.files.create(
        file=("x.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    kept = await gateway.upload(b"y", "y.txt", "user_data")
    gateway.clock.shift_s = 3601
    with pytest.raises(openai.NotFoundError):
        await gateway.client.files.retrieve(file.id)
    assert [f.id async for f in gateway.client.files.list()] == [kept]
    assert on_disk(gateway) == {kept}
    assert await redis_client.zcard(GatewayKeys.of(redis_client).files_expiry) == 0


async def test_an_expiry_without_a_record_is_dropped(gateway: OfflineGateway, redis_client: Redis) -> None:
    await redis_client.zadd(GatewayKeys.of(redis_client).files_expiry, {"file-evicted": 1.0})
    assert await gateway.files.sweep() == 0
    assert await redis_client.zcard(GatewayKeys.of(redis_client).files_expiry) == 0


async def test_content_that_is_deleted_during_a_download_request(gateway: OfflineGateway) -> None:
    file_id = await gateway.upload(b"x")
    (gateway.files.data_dir / "files" / file_id).unlink()  # as a delete does between the look-up and the answer
    with pytest.raises(openai.NotFoundError):
        await gateway.client.files.content(file_id)


async def test_lists(gateway: OfflineGateway) -> None:
    ids = [await gateway.upload(b"x", purpose=p) for p in ("batch", "user_data", "batch", "vision", "batch")]
    assert [f.id async for f in gateway.client.files.list(limit=2)] == ids[::-1]
    assert [f.id async for f in gateway.client.files.list(limit=2, order="asc")] == ids
    assert [f.id async for f in gateway.client.files.list(limit=1, purpose="batch")] == ids[::-2]
    assert [f.id async for f in gateway.client.files.list(purpose="expiry")] == []
    page = (await gateway.http.get("/v1/files", params={"limit": 2, "after": ids[3]})).json()
    assert (page["object"], page["first_id"], page["last_id"]) == ("list", ids[2], ids[1])
    assert page["has_more"] is True and [f["id"] for f in page["data"]] == [ids[2], ids[1]]


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": 0}, "limit"), ({"limit": 10_001}, "limit"), ({"order": "up"}, "order"), ({"after": "file-0"}, "after")],
)
async def test_bad_queries(gateway: OfflineGateway, query: dict[str, Any], param: str) -> None:
    answer = await gateway.http.get("/v1/files", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_leftovers_of_a_crash_are_swept(gateway: OfflineGateway) -> None:
    kept = await gateway.upload(b"x")
    for name in ("files/file-lost", "incoming/tmp1"):
        (gateway.files.data_dir / name).write_bytes(b"lost")
    await gateway.files.sweep_orphans(before_s=0.0)
    assert on_disk(gateway) == {kept, "file-lost", "tmp1"}, "they may be uploads under way"
    gateway.clock.shift_s = 3601
    await gateway.files.sweep_orphans(gateway.clock.wall_ms() / 1000)
    assert on_disk(gateway) == {kept}
