"""Full disks and quotas: what is refused, with which error, and that nothing of it is left."""

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from gateway.files import disk, local_storage
from gateway.files.disk import DiskFull, DiskReserve, noticing_full_disk
from gateway.http.multipart import MAX_FORM_BYTES
from gateway.identity import Keyring
from tests.gateway.api_keys import secret_of
from tests.gateway.offline import OfflineGateway, jsonl, keyring, lines, running_gateway
from tests.gateway.stand import Bytes

RESERVE = 100 * 2**20
MB = 2**20


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    keys = keyring(one=None, two=None)
    async with running_gateway(
        redis_client, tmp_path, keys=keys, disk_reserve_mb=Bytes(RESERVE), files_quota_mb=2
    ) as gateway:
        yield gateway


def left_over(gateway: OfflineGateway) -> list[Path]:
    folders = (gateway.files.data_dir / name for name in ("files", "incoming", "batches"))
    return [path for folder in folders for path in folder.iterdir()]


class Disk:
    """Stands in for the free space of the disk, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 10 * RESERVE
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=self.free))


async def test_below_the_reserve_uploads_and_batches_are_refused_and_leave_nothing(
    gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, one = Disk(monkeypatch), gateway.as_key("one")
    file_id = await one.upload(jsonl(lines(2)))
    before = left_over(gateway)
    space.free = RESERVE - 1
    for attempt in (one.upload(b"{}"), one.create(file_id)):
        with pytest.raises(openai.InternalServerError) as refused:
            await attempt
        assert refused.value.status_code == 507
        assert refused.value.code == "insufficient_storage"
        assert refused.value.response.headers["x-should-retry"] == "false"
    assert left_over(gateway) == before
    assert [f.id async for f in await one.client.files.list()] == [file_id]
    space.free = 10 * RESERVE
    assert (await one.ended((await one.create(file_id)).id)).status == "completed"


async def test_an_announced_upload_must_leave_the_reserve(
    gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Disk(monkeypatch)
    space.free = RESERVE + 1000
    with pytest.raises(openai.InternalServerError, match="no space"):
        await gateway.as_key("one").upload(b"x" * 2000)
    assert left_over(gateway) == []


async def test_the_disk_is_watched_while_an_upload_comes_in(
    gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads without a length, and many at once, are noticed too."""
    monkeypatch.setattr("gateway.http.multipart.CHECK_BYTES", 1000)
    space, sent = Disk(monkeypatch), 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'--XX\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        for _ in range(1000):
            sent += 1
            if sent == 5:
                space.free = RESERVE - 1
            yield b"x" * 500

    headers = {"content-type": "multipart/form-data; boundary=XX", **gateway.as_key("one").client.auth_headers}
    response = await gateway.http.post("/v1/files", content=body(), headers=headers)
    assert response.status_code == 507
    assert sent < 10
    assert left_over(gateway) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
async def test_a_full_disk_is_noticed_where_it_is_written(
    gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, "no space")

    monkeypatch.setattr(local_storage, "move_durably", full)
    with pytest.raises(openai.InternalServerError) as refused:
        await gateway.as_key("one").upload(b"{}")
    assert refused.value.status_code == 507
    assert left_over(gateway) == []


def test_other_errors_of_a_disk_are_not_taken_for_a_full_one(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), noticing_full_disk():
        raise PermissionError(errno.EACCES, "denied")
    DiskReserve(tmp_path, 1).check()
    with pytest.raises(DiskFull):
        DiskReserve(tmp_path, 2**62).check()
    assert not disk.is_disk_full(None)


async def test_a_key_may_fill_its_quota_and_no_more(gateway: OfflineGateway) -> None:
    one, two = gateway.as_key("one"), gateway.as_key("two")
    first = await one.upload(b"x" * MB)
    await one.upload(b"x" * MB)
    for size in (1, 5 * MB):  # the second is refused before it is sent
        with pytest.raises(openai.APIStatusError, match="may have 2 MB") as refused:
            await one.upload(b"x" * size)
        assert (refused.value.status_code, refused.value.code) == (413, "files_quota_exceeded")
    assert len(left_over(gateway)) == 2
    await two.upload(b"x" * MB)
    await one.client.files.delete(first)
    await one.upload(b"x" * MB)
    assert await gateway.files.used_bytes("one") == 2 * MB


async def test_a_form_of_unknown_length_is_refused_when_it_exceeds_the_quota(gateway: OfflineGateway) -> None:
    sent = 0

    async def form() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        for _ in range(100):
            sent += MB
            yield b"x" * MB
        yield b"\r\n--x--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=x", "authorization": f"Bearer {secret_of('one')}"}
    refused = await gateway.http.post("/v1/files", content=form(), headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "files_quota_exceeded")
    assert sent < 10 * MB
    assert left_over(gateway) == [] and gateway.files.arriving.total() == 0


async def test_uploads_at_the_same_time_do_not_exceed_the_quota_together(gateway: OfflineGateway) -> None:
    one = gateway.as_key("one")
    outcomes = await asyncio.gather(*(one.upload(b"x" * (MB // 2)) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(outcome, str) for outcome in outcomes) == 4
    assert len(left_over(gateway)) == 4


async def test_output_files_count_but_are_never_refused(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path, files_quota_mb=1) as gateway:
        file_id = await gateway.upload(jsonl(lines(3)).ljust(MB, b"\n"))
        batch = await gateway.ended((await gateway.create(file_id)).id)
        assert len(await gateway.read(batch.output_file_id)) == 3
        assert await gateway.files.used_bytes(None) > MB
        with pytest.raises(openai.APIStatusError, match="Delete some"):
            await gateway.upload(b"x" * MAX_FORM_BYTES)
        assert batch.output_file_id is not None
        await gateway.client.files.delete(batch.output_file_id)
        await gateway.client.files.delete(file_id)
        assert await gateway.files.used_bytes(None) == 0


async def test_a_key_s_own_quota_comes_first(redis_client: Redis, tmp_path: Path) -> None:
    key = keyring(one=None).keys[0]
    keys = Keyring([type(key)(key.name, key.sha256, files_quota_mb=3)])
    async with running_gateway(redis_client, tmp_path, keys=keys, files_quota_mb=1) as gateway:
        await gateway.as_key("one").upload(b"x" * 2 * MB)
        with pytest.raises(openai.APIStatusError, match="may have 3 MB"):
            await gateway.as_key("one").upload(b"x" * 2 * MB)
