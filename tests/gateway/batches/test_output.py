"""Output files are private, and a failed attempt to write them leaves nothing behind."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.batches.input import CHUNK_LINES, input_path
from gateway.batches.model import Batch, BatchStatus, LineResult
from gateway.batches.output import BATCH_CANCELLED, write_files
from gateway.batches.store import BatchStore, OwnershipLost
from gateway.files.store import FileStore, StoredFile
from tests.gateway.offline import ShiftedClock, jsonl, lines, running_gateway

BATCH_ID = "batch_1"


class FullDisk(FileStore):
    """Accepts the first file of a batch and fails at the second one."""

    async def add(self, content: Path, **fields: object) -> StoredFile:
        if str(fields["filename"]).endswith("_error.jsonl"):
            raise OSError("no space left on device")
        return await super().add(content, **fields)  # type: ignore[arg-type]


async def finalizing(redis: Redis, directory: Path, count: int) -> tuple[BatchStore, Batch]:
    """Return a batch of `count` lines, of which the first succeeded and the second failed."""
    directory.mkdir(parents=True)
    input_path(directory).write_bytes(jsonl(lines(count)))
    store = BatchStore(redis)
    await store.create(Batch(BATCH_ID, "/v1/completions", "file-1", "24h", BatchStatus.FINALIZING, 1, 2))
    lock = store.owner_lock(BATCH_ID, 60.0)
    assert await lock.acquire()
    results = [LineResult(1, True, b"{}"), LineResult(2, False, b"[]")]
    await store.record(BATCH_ID, results, bytes(lock.local.token or b"").decode())
    batch = await store.get(BATCH_ID)
    assert batch is not None
    return store, batch


async def test_lines_are_written_chunk_by_chunk(redis_client: Redis, tmp_path: Path) -> None:
    directory = tmp_path / "batches" / BATCH_ID
    store, batch = await finalizing(redis_client, directory, CHUNK_LINES + 10)
    files = FileStore(redis_client, tmp_path, ShiftedClock())
    ids = await write_files(store, files, batch, directory, BATCH_CANCELLED)
    assert files.path(ids["output_file_id"]).read_bytes() == b"{}\n"
    errors = files.path(ids["error_file_id"]).read_bytes().splitlines()
    assert len(errors) == CHUNK_LINES + 9 and errors[0] == b"[]"
    assert [p.name for p in directory.iterdir()] == ["input.jsonl"]


@pytest.mark.parametrize("broken", ["disk", "count"])
async def test_a_failed_attempt_leaves_no_files(redis_client: Redis, tmp_path: Path, broken: str) -> None:
    directory = tmp_path / "batches" / BATCH_ID
    store, batch = await finalizing(redis_client, directory, 3)
    files = FileStore(redis_client, tmp_path, ShiftedClock())
    if broken == "disk":
        files = FullDisk(redis_client, tmp_path, ShiftedClock())
    else:
        await redis_client.delete(f"tidegate:batches:results:{BATCH_ID}")
    for _ in range(2):
        with pytest.raises(OSError if broken == "disk" else OwnershipLost):
            await write_files(store, files, batch, directory, None)
    assert [p.name for p in directory.iterdir()] == ["input.jsonl"]


async def test_inputs_and_outputs_are_private(redis_client: Redis, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    async with running_gateway(redis_client, data_dir) as gateway:
        await gateway.ended((await gateway.submit(lines(2))).id)
    paths = [data_dir, *data_dir.rglob("*")]
    modes = {p.relative_to(tmp_path).parts[:2]: p.stat().st_mode & 0o777 for p in paths if p.is_dir()}
    assert set(modes.values()) == {0o700} and ("data", "batches") in modes
    contents = [p for p in paths if p.is_file()]
    assert len(contents) == 2 and {p.stat().st_mode & 0o777 for p in contents} == {0o600}
