"""Uploads in parts through the official client, on a real store and disk."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Upload
from redis.asyncio import Redis

from gateway.files.store import FileStore
from gateway.jobs.uploads import model
from gateway.jobs.uploads import store as upload_store
from tests.gateway.offline import OfflineGateway, jsonl, keyring, lines, make_gateway, running_gateway
from tests.gateway.stand import running_stand

HOUR_S = 3600
CALLS = ("parts", "complete", "cancel")
KINDS: dict[str, Any] = {"mime_type": "application/jsonl", "purpose": "batch"}


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    keys = keyring(one=None, two=None)
    async with running_gateway(redis_client, tmp_path, keys=keys, files_quota_mb=1) as gateway:
        yield gateway.as_key("one")


async def begun(gateway: OfflineGateway, size: int, name: str = "in.jsonl", **more: Any) -> Upload:
    return await gateway.client.uploads.create(bytes=size, filename=name, **KINDS, **more)


async def add(gateway: OfflineGateway, upload: Upload, data: bytes) -> str:
    return (await gateway.client.uploads.parts.create(upload.id, data=data)).id


def parts_on_disk(gateway: OfflineGateway) -> list[Path]:
    folders = (gateway.files.data_dir / name for name in ("uploads", "incoming"))
    return [path for folder in folders for path in folder.rglob("*")]


async def test_the_clients_own_chunked_upload_becomes_the_input_of_a_batch(
    gateway: OfflineGateway, tmp_path: Path
) -> None:
    content = jsonl(lines(20))
    path = tmp_path / "requests.jsonl"
    path.write_bytes(content)
    upload = await gateway.client.uploads.upload_file_chunked(
        file=path, part_size=700, md5=hashlib.md5(content).hexdigest(), **KINDS
    )
    assert (upload.status, upload.bytes, upload.expires_at) == (
        "completed",
        len(content),
        upload.created_at + HOUR_S,
    )
    assert upload.file is not None and upload.file.filename == "requests.jsonl" and upload.file.purpose == "batch"
    assert upload.file.expires_at == upload.file.created_at + 30 * 24 * HOUR_S
    assert (await gateway.client.files.content(upload.file.id)).content == content
    assert parts_on_disk(gateway) == []
    batch = await gateway.ended((await gateway.create(upload.file.id)).id)
    assert batch.request_counts is not None and batch.request_counts.completed == 20


async def test_parts_follow_each_other_as_the_completion_says(gateway: OfflineGateway) -> None:
    upload = await begun(gateway, 6, expires_after={"anchor": "created_at", "seconds": HOUR_S})
    assert (upload.status, upload.file) == ("pending", None)
    second, first, spare = [await add(gateway, upload, data) for data in (b"def", b"abc", b"xyz")]
    done = await gateway.client.uploads.complete(upload.id, part_ids=[first, second])
    assert done.file is not None and done.file.expires_at == done.file.created_at + HOUR_S
    assert (await gateway.client.files.content(done.file.id)).content == b"abcdef"
    again = await gateway.client.uploads.complete(upload.id, part_ids=[first, second])
    assert again == done, "a client that lost the answer gets it again"
    with pytest.raises(openai.BadRequestError, match="completed"):
        await add(gateway, upload, b"late")
    with pytest.raises(openai.BadRequestError, match="completed"):
        await gateway.client.uploads.cancel(upload.id)
    assert spare and parts_on_disk(gateway) == []


async def test_what_does_not_fit_is_refused_and_can_be_mended(gateway: OfflineGateway) -> None:
    upload = await begun(gateway, 6)
    first, second = await add(gateway, upload, b"abc"), await add(gateway, upload, b"def")
    complete = gateway.client.uploads.complete
    wrong: list[tuple[list[str], dict[str, Any], str, str]] = [
        ([first], {}, "part_ids", "have 3 bytes, but the upload was announced with 6"),
        ([first, first], {}, "part_ids", "twice"),
        ([first, "part_unknown"], {}, "part_ids", "no part 'part_unknown'"),
        ([first, second], {"md5": "0" * 32}, "md5", hashlib.md5(b"abcdef").hexdigest()),
        ([first, second], {"md5": "xyz"}, "md5", "md5"),
        ([], {}, "part_ids", "part_ids"),
    ]
    for part_ids, more, param, message in wrong:
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            await complete(upload.id, part_ids=part_ids, **more)
        assert refused.value.param == param
    assert await gateway.files.used_bytes("one") == 0
    done = await complete(upload.id, part_ids=[first, second], md5=hashlib.md5(b"abcdef").hexdigest().upper())
    assert done.status == "completed"


async def test_a_cancelled_upload_leaves_nothing(gateway: OfflineGateway) -> None:
    upload = await begun(gateway, 6)
    part = await add(gateway, upload, b"abcdef")
    assert parts_on_disk(gateway)
    for _ in range(2):
        assert (await gateway.client.uploads.cancel(upload.id)).status == "cancelled"
    assert parts_on_disk(gateway) == []
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await gateway.client.uploads.complete(upload.id, part_ids=[part])
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await add(gateway, upload, b"late")
    assert parts_on_disk(gateway) == []


async def test_an_upload_expires_and_is_swept(gateway: OfflineGateway) -> None:
    abandoned = await begun(gateway, 6)
    part = await add(gateway, abandoned, b"abcdef")
    gateway.clock.shift_s = HOUR_S - 5
    fresh = await begun(gateway, 3)
    kept = await add(gateway, fresh, b"abc")
    gateway.clock.shift_s = HOUR_S + 1
    with pytest.raises(openai.BadRequestError, match="expired"):
        await gateway.client.uploads.complete(abandoned.id, part_ids=[part])
    await gateway.uploads.sweep()
    assert {path.name for path in parts_on_disk(gateway)} == {fresh.id, kept}


@pytest.mark.parametrize("with_key", [False, True])  # with a key, the file is received before it is refused
async def test_files_leave_the_quota_that_pending_uploads_have_reserved(
    gateway: OfflineGateway, with_key: bool
) -> None:
    pending = await begun(gateway, 2**20 - 100)
    headers = {"Idempotency-Key": "k"} if with_key else {}
    sent: dict[str, Any] = {"purpose": "user_data", "extra_headers": headers}
    with pytest.raises(openai.APIStatusError, match="pending uploads") as refused:
        await gateway.client.files.create(file=("x.bin", b"x" * 101), **sent)
    assert (refused.value.status_code, refused.value.code) == (413, "files_quota_exceeded")
    await gateway.client.uploads.cancel(pending.id)
    await gateway.client.files.create(file=("x.bin", b"x" * 101), **sent)


async def test_pending_uploads_reserve_the_quota_of_their_owner(gateway: OfflineGateway) -> None:
    await gateway.upload(b"x" * 2**19, "x.bin", "user_data")
    first = await begun(gateway, 2**19 - 100)
    with pytest.raises(openai.APIStatusError) as refused:
        await begun(gateway, 101)
    assert (refused.value.status_code, refused.value.code) == (413, "files_quota_exceeded")
    assert (await begun(gateway, 100)).status == "pending"
    assert (await begun(gateway.as_key("two"), 2**20)).status == "pending"
    await gateway.client.uploads.cancel(first.id)
    second = await begun(gateway, 2**19 - 100)
    gateway.clock.shift_s = HOUR_S + 1
    assert (await begun(gateway, 2**19)).status == "pending", "expired ones reserve nothing"
    assert second.id != first.id


async def test_the_number_of_pending_uploads_is_limited(
    gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_store, "MAX_PENDING", 2)
    first, _ = await begun(gateway, 10), await begun(gateway, 10)
    with pytest.raises(openai.RateLimitError, match="Complete or cancel"):
        await begun(gateway, 10)
    assert (await begun(gateway.as_key("two"), 10)).status == "pending"
    await gateway.client.uploads.cancel(first.id)
    assert (await begun(gateway, 10)).status == "pending"


async def test_an_upload_takes_no_more_than_it_may_need(
    gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "MAX_PART_BYTES", 10)
    monkeypatch.setattr("gateway.routes.jobs.uploads.MAX_PART_BYTES", 10)
    monkeypatch.setattr(upload_store, "MAX_PARTS", 3)
    upload = await begun(gateway, 2)
    with pytest.raises(openai.APIStatusError) as refused:
        await add(gateway, upload, b"x" * 11)
    assert (refused.value.status_code, refused.value.code) == (413, None)
    await add(gateway, upload, b"x" * 10)
    with pytest.raises(openai.BadRequestError, match="far more bytes"):
        await add(gateway, upload, b"x" * 5)
    for _ in range(2):
        await add(gateway, upload, b"x")
    with pytest.raises(openai.BadRequestError, match="far more bytes"):
        await add(gateway, upload, b"x")
    assert len([path for path in parts_on_disk(gateway) if path.is_file()]) == 3


async def test_uploads_of_another_key_are_unknown(gateway: OfflineGateway) -> None:
    upload, other = await begun(gateway, 3), gateway.as_key("two")
    part = await add(gateway, upload, b"abc")
    for attempt in (
        add(other, upload, b"abc"),
        other.client.uploads.complete(upload.id, part_ids=[part]),
        other.client.uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.NotFoundError, match="No such Upload object"):
            await attempt
    assert (await gateway.client.uploads.complete(upload.id, part_ids=[part])).status == "completed"


async def test_a_gateway_with_another_disk_says_so(
    gateway: OfflineGateway, redis_client: Redis, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = make_gateway(redis_client, tmp_path_factory.mktemp("other"), keys=keyring(one=None)).as_key("one")
    upload = await begun(gateway, 2)
    part = await add(gateway, upload, b"ab")
    with pytest.raises(openai.BadRequestError, match="need the same data directory"):
        await other.client.uploads.complete(upload.id, part_ids=[part])
    await other.http.aclose()


async def test_a_completion_can_be_repeated_after_a_crash(
    gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway dies after the file is stored, and before the upload is marked as completed."""
    upload = await begun(gateway, 3)
    part = await add(gateway, upload, b"abc")

    async def dies(*_: Any) -> str:
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(upload_store.UploadStore, "finish", dies)
        with pytest.raises(asyncio.CancelledError):
            await gateway.client.uploads.complete(upload.id, part_ids=[part])
    done = await gateway.client.uploads.complete(upload.id, part_ids=[part])
    assert done.file is not None and done.status == "completed"
    assert [file.id async for file in gateway.client.files.list()] == [done.file.id]
    assert await gateway.files.used_bytes("one") == 3
    assert parts_on_disk(gateway) == []


async def test_an_upload_that_is_cancelled_while_it_is_completed_leaves_no_file(
    gateway: OfflineGateway, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_gateway(redis_client, gateway.files.data_dir, keys=keyring(one=None)).as_key("one")
    upload, add_file = await begun(gateway, 3), FileStore.add
    part = await add(gateway, upload, b"abc")

    async def cancelled_meanwhile(files: FileStore, *arguments: Any, **options: Any) -> Any:
        await other.client.uploads.cancel(upload.id)
        return await add_file(files, *arguments, **options)

    monkeypatch.setattr(FileStore, "add", cancelled_meanwhile)
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await gateway.client.uploads.complete(upload.id, part_ids=[part])
    assert [file async for file in gateway.client.files.list()] == []
    await other.http.aclose()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"bytes": 0}, "bytes"),
        ({"bytes": model.MAX_UPLOAD_BYTES + 1}, "bytes"),
        ({"bytes": "3"}, "bytes"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"filename": "in.csv"}, "filename"),
        ({"filename": None}, "filename"),
        ({"mime_type": None}, "mime_type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    ],
)
async def test_bad_parameters_are_refused(gateway: OfflineGateway, change: dict[str, Any], param: str) -> None:
    body = {"bytes": 3, "filename": "in.jsonl", **KINDS} | change
    given, headers = {k: v for k, v in body.items() if v is not None}, gateway.client.auth_headers
    answer = await gateway.http.post("/v1/uploads", json=given, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_odd_parts_are_refused(gateway: OfflineGateway) -> None:
    upload, headers = await begun(gateway, 3), gateway.client.auth_headers
    path = f"/v1/uploads/{upload.id}/parts"
    for files in ({"file": b"abc"}, {"data": b""}):
        answer = await gateway.http.post(path, files=files, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "data")
    assert (await gateway.http.post(path, content=b"abc", headers=headers)).status_code == 400
    for name in ("upload_none", "..%2F..%2Fetc", "x" * 3000):
        for call in ("parts", "cancel"):
            answer = await gateway.http.post(f"/v1/uploads/{name}/{call}", files={"data": b"x"}, headers=headers)
            assert answer.status_code == 404 and len(answer.content) < 500
    assert parts_on_disk(gateway) == []


async def test_only_parts_may_be_larger_than_other_bodies() -> None:
    async with running_stand(with_worker=False) as stand:
        large = b"x" * (stand.gateway.max_body_bytes + 1)
        statuses = {call: (await stand.http.post(f"/v1/uploads/u/{call}", content=large)).status_code for call in CALLS}
    assert statuses == {"parts": 404, "complete": 413, "cancel": 413}, "404: this server keeps no files"
