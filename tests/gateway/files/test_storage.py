"""What every storage promises: in a directory, in memory, and in an S3-compatible server."""

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from gateway.files import object_storage
from gateway.files.local_storage import LocalStorage, opened_in_thread, sha256_of
from gateway.files.object_storage import BadStorageUrl, ObjectStorage, open_storage
from gateway.files.storage import ContentDamaged, ContentLost, Storage, StorageUnreachable
from tests.gateway.files.s3 import BUCKET, Address, s3_options, s3_server


@pytest.fixture(scope="module")
def s3_address() -> Iterator[Address]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.full)])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path)
    prefix = secrets.token_hex(4)
    if request.param == "memory":
        return open_storage(f"memory://{prefix}/data", tmp_path)
    pytest.importorskip("s3fs")
    monkeypatch.setitem(fsspec.config.conf, "s3", s3_options(request.getfixturevalue("s3_address")))
    return ObjectStorage(f"s3://{BUCKET}/{prefix}", tmp_path)


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "incoming-upload"
    path.write_bytes(content)
    (tmp_path / "files").mkdir(exist_ok=True)
    return path


async def read(storage: Storage, name: str, start: int, end: int) -> bytes:
    return b"".join([chunk async for chunk in storage.read(name, start, end)])


async def test_a_content_is_moved_in_and_can_be_read_in_parts(storage: Storage, tmp_path: Path) -> None:
    content = os.urandom(5_000_000)
    source = written(tmp_path, content)
    await storage.put(source, "files/a")
    assert not source.exists()
    assert await read(storage, "files/a", 0, len(content)) == content
    assert await read(storage, "files/a", 4_194_000, 4_500_000) == content[4_194_000:4_500_000]
    await storage.put(written(tmp_path, b"other"), "files/a")
    assert await read(storage, "files/a", 0, 5) == b"other"
    with pytest.raises(ContentLost):
        await read(storage, "files/a", 0, 6)
    with pytest.raises(ContentLost):
        await read(storage, "files/b", 0, 1)


async def test_a_copy_outlives_its_source(storage: Storage, tmp_path: Path) -> None:
    await storage.put(written(tmp_path, b"1"), "files/a")
    await storage.copy("files/a", "batches/x/input.jsonl")
    await storage.copy("files/a", "batches/x/input.jsonl")  # as after a crash
    await storage.remove(["files/a", "files/never"])
    path = await storage.fetch("batches/x/input.jsonl")
    assert path.read_bytes() == b"1" and path == tmp_path / "batches/x/input.jsonl"
    assert await storage.fetch("batches/x/input.jsonl") == path
    for name in ("batches/late/input.jsonl", "batches/x/other"):
        with pytest.raises(ContentLost):
            await storage.fetch(name)
    with pytest.raises(ContentLost):
        await storage.copy("files/a", "batches/late/input.jsonl")
    assert [entry.name for entry in await storage.entries("batches")] == ["x"]


async def test_appended_bytes_come_back(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "batches/x").mkdir(parents=True)
    name = "batches/x/results-1"
    pieces = [b"a" * 10, b"b" * 300_000, b"c", b"d" * 5, b"e" * 7]
    position = 0
    for piece in pieces:
        for _ in range(2):  # an append whose outcome is unknown is repeated
            await storage.append(name, position, piece)
        position += len(piece)
    await storage.append("batches/x/results-10", 0, b"another execution")
    assert (await storage.fetch_appended(name, position)).read_bytes() == b"".join(pieces)
    recorded = position - 7
    assert (await storage.fetch_appended(name, recorded)).read_bytes()[:recorded] == b"".join(pieces)[:recorded]
    for missing, size in ((name, position + 1), ("batches/x/results-2", 1)):
        with pytest.raises(ContentLost):
            await storage.fetch_appended(missing, size)


async def test_an_append_to_a_folder_that_was_removed_is_no_fault(tmp_path: Path) -> None:
    with pytest.raises(ContentLost):
        await LocalStorage(tmp_path).append("batches/x/results-1", 0, b"line")


async def test_a_fetch_that_fails_writes_nothing_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that comes later must not get into a file that has the descriptor of the closed one."""
    storage, name, gate = open_storage(f"memory://{secrets.token_hex(4)}", tmp_path), "results-1", threading.Event()
    assert isinstance(storage, ObjectStorage)
    await storage.append(name, 0, b"a" * 10)
    await storage.append(name, 10, b"b" * 10)
    cat_file = storage._files.cat_file

    def first_fails(path: str, **options: Any) -> bytes:
        if path.endswith("/000000000000000"):
            raise OSError("broken")
        assert gate.wait(30)
        content: bytes = cat_file(path, **options)
        return content

    monkeypatch.setattr(storage._files, "cat_file", first_fails)
    with pytest.raises(StorageUnreachable):
        await storage.fetch_appended(name, 20)
    with (tmp_path / "other").open("wb"):
        gate.set()
        await asyncio.to_thread(storage._threads.shutdown)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*rest, return_exceptions=True)
        assert (tmp_path / "other").read_bytes() == b""


async def test_a_folder_is_listed_and_removed_as_a_whole(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "batches/x").mkdir(parents=True)
    before_s = time.time() - 2
    await storage.append("batches/x/results-1", 0, b"1")
    await storage.append("batches/x/results-1", 1, b"2")
    await storage.put(written(tmp_path, b"3"), "batches/x/input.jsonl")
    await storage.put(written(tmp_path, b"4"), "files/x")
    [entry] = await storage.entries("batches")
    assert entry.name == "x" and before_s <= entry.modified_s <= time.time() + 2
    await storage.remove_folder("batches/x")
    await storage.remove_folder("batches/never")
    assert await storage.entries("batches") == [] and not (tmp_path / "batches/x").exists()
    assert [entry.name for entry in await storage.entries("files")] == ["x"]
    assert await storage.entries("never") == []


async def test_a_local_copy_is_checked_when_it_is_made(tmp_path: Path) -> None:
    storage = open_storage(f"memory://{secrets.token_hex(4)}", tmp_path)
    source = written(tmp_path, b"right")
    checksum = sha256_of(source)
    await storage.put(source, "files/a")
    assert (await storage.fetch("files/a", checksum)).read_bytes() == b"right"
    await storage.put(written(tmp_path, b"wrong"), "files/b")
    with pytest.raises(ContentDamaged):
        await storage.fetch("files/b", checksum)
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["a"]


async def test_a_storage_that_refuses_or_hangs_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no error of it looks as if a content was lost."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(4)}", tmp_path)
    for error in (PermissionError("denied"), FileNotFoundError("no bucket"), TimeoutError(), RuntimeError("?")):
        monkeypatch.setattr(storage._files, "pipe_file", raising(error), raising=False)
        with pytest.raises(StorageUnreachable):
            await storage.append("batches/x/results", 0, b"1")
    monkeypatch.setattr(object_storage, "CALL_S", 0.01)
    released = threading.Event()
    monkeypatch.setattr(storage._files, "pipe_file", lambda *_: released.wait(60), raising=False)
    with pytest.raises(StorageUnreachable):
        await storage.append("batches/x/results", 0, b"1")
    released.set()


def raising(error: Exception) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("url", ["s4://bucket", "bucket/prefix", "file://host/path", "file:relative"])
def test_bad_urls_are_named(url: str, tmp_path: Path) -> None:
    with pytest.raises(BadStorageUrl, match="--files-url"):
        open_storage(url, tmp_path)


async def test_what_a_thread_opens_for_a_caller_who_is_cancelled_is_closed() -> None:
    may_open, closed = threading.Event(), asyncio.Event()

    class File:
        def close(self) -> None:
            closed.set()

    def open_it() -> File:
        may_open.wait(60)
        return File()

    async def read() -> None:
        async with opened_in_thread(open_it):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)  # it waits for the thread now
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not closed.is_set()
    may_open.set()
    await closed.wait()
