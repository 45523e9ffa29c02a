"""Output files are private and in the order of the input, and a failed attempt to write them leaves nothing behind."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from gateway.files import marker
from gateway.files.disk import DiskFull
from gateway.files.storage import ContentLost
from gateway.files.store import FileStore, StoredFile
from gateway.jobs.batches.input.lines import CHUNK_LINES, input_name
from gateway.jobs.batches.lines.output import BATCH_CANCELLED, write_files
from gateway.jobs.batches.lines.recorder import ResultRecorder
from gateway.jobs.batches.model import Batch, BatchStatus, LineResult
from gateway.jobs.batches.store import BatchStore, OwnershipLost
from gateway.store_keys import GatewayKeys
from tests.gateway.offline import ShiftedClock, jsonl, lines, running_gateway

BATCH_ID = "batch_1"


class FullDisk(FileStore):
    """Accepts the first file of a batch and fails at the second one."""

    async def add(self, content: Path, **fields: object) -> StoredFile:
        if str(fields["filename"]).endswith("_error.jsonl"):
            raise OSError("no space left on device")
        return await super().add(content, **fields)  # type: ignore[arg-type]


async def finalizing(redis: Redis, data_dir: Path, count: int) -> tuple[BatchStore, Batch]:
    """Return a batch of `count` lines, of which the third succeeded first, and then the first and the second failed."""
    path = data_dir / input_name(BATCH_ID)
    path.parent.mkdir(parents=True)
    path.write_bytes(jsonl(lines(count)))
    store = BatchStore(redis)
    await store.create(Batch(BATCH_ID, "/v1/completions", "file-1", "24h", BatchStatus.FINALIZING, 1, 2, total=count))
    lock = store.owner_lock(BATCH_ID, 60.0)
    assert await lock.acquire()
    token = bytes(lock.local.token or b"").decode()
    for group in ([LineResult(3, True, b"{}")], [LineResult(2, False, b"[2]"), LineResult(1, True, b"[1]")]):
        recorder = ResultRecorder(
            BATCH_ID, store, FileStore(redis, data_dir, ShiftedClock()), ShiftedClock(), lambda: token
        )
        for result in group:
            await recorder.add(result)
        await recorder.flush()
    batch = await store.get(BATCH_ID)
    assert batch is not None
    return store, batch


async def test_an_output_leaves_half_of_the_disk_s_reserve(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, batch = await finalizing(redis_client, tmp_path, 3)
    files = FileStore(redis_client, tmp_path, ShiftedClock(), reserve_bytes=200)
    size = sum((await store.results(BATCH_ID)).values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=99 + size))
    with pytest.raises(DiskFull):
        await write_files(store, files, batch, None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 + size))
    assert sorted(await write_files(store, files, batch, None)) == ["error_file_id", "output_file_id"]


async def test_lines_are_written_chunk_by_chunk(redis_client: Redis, tmp_path: Path) -> None:
    store, batch = await finalizing(redis_client, tmp_path, CHUNK_LINES + 10)
    files = FileStore(redis_client, tmp_path, ShiftedClock())
    ids = await write_files(store, files, batch, BATCH_CANCELLED)
    assert (tmp_path / "files" / ids["output_file_id"]).read_bytes() == b"[1]\n{}\n"
    errors = (tmp_path / "files" / ids["error_file_id"]).read_bytes().splitlines()
    assert len(errors) == CHUNK_LINES + 8 and errors[0] == b"[2]"
    assert not [p for p in (tmp_path / "batches" / BATCH_ID).iterdir() if p.name[:5] in ("outpu", "error")]


async def test_what_a_dead_gateway_has_not_recorded_is_not_written(redis_client: Redis, tmp_path: Path) -> None:
    store, batch = await finalizing(redis_client, tmp_path, 3)
    for name in await store.results(BATCH_ID):
        with (tmp_path / name).open("ab") as results:
            results.write(b"1 1 twice\n2 1 ha")
    (tmp_path / "batches" / BATCH_ID / "results-dead").write_bytes(b"1 1 twice\n")
    ids = await write_files(store, FileStore(redis_client, tmp_path, ShiftedClock()), batch, None)
    assert (tmp_path / "files" / ids["output_file_id"]).read_bytes() == b"[1]\n{}\n"
    assert (tmp_path / "files" / ids["error_file_id"]).read_bytes() == b"[2]\n"


@pytest.mark.parametrize("broken", ["disk", "count", "short", "damaged"])
async def test_a_failed_attempt_leaves_no_files(redis_client: Redis, tmp_path: Path, broken: str) -> None:
    store, batch = await finalizing(redis_client, tmp_path, 3)
    files = FileStore(redis_client, tmp_path, ShiftedClock())
    [first, *_] = await store.results(BATCH_ID)
    if broken == "disk":
        files = FullDisk(redis_client, tmp_path, ShiftedClock())
    elif broken == "count":
        await redis_client.delete(GatewayKeys.of(redis_client).batch_results(BATCH_ID))
    else:
        (tmp_path / first).write_bytes(b"3 1 {" if broken == "short" else b"x" * 100)
    before = sorted((tmp_path / "batches" / BATCH_ID).iterdir())
    for _ in range(2):
        with pytest.raises({"disk": OSError, "count": OwnershipLost}.get(broken, ContentLost)):
            await write_files(store, files, batch, None)
    assert sorted((tmp_path / "batches" / BATCH_ID).iterdir()) == before


async def test_inputs_and_outputs_are_private(redis_client: Redis, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    async with running_gateway(redis_client, data_dir) as gateway:
        await gateway.ended((await gateway.submit(lines(2))).id)
    paths = [data_dir, *data_dir.rglob("*")]
    modes = {p.relative_to(tmp_path).parts[:2]: p.stat().st_mode & 0o777 for p in paths if p.is_dir()}
    assert set(modes.values()) == {0o700} and ("data", "batches") in modes
    contents = [p for p in paths if p.is_file() and p.name != marker.NAME]
    assert len(contents) == 2 and {p.stat().st_mode & 0o777 for p in contents} == {0o600}
