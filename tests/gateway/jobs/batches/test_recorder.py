"""Results are recorded exactly once, whatever fails between the storage and the store."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import TimeoutError as StoreSilent

from gateway.files.disk import DiskFull
from gateway.files.local_storage import LocalStorage
from gateway.files.store import FileStore
from gateway.jobs.batches.lines import recorder as recording
from gateway.jobs.batches.lines.output import write_files
from gateway.jobs.batches.lines.recorder import ResultRecorder
from gateway.jobs.batches.model import Batch, BatchStatus, LineResult
from gateway.jobs.batches.store import BatchStore, OwnershipLost
from gateway.store_keys import GatewayKeys
from tests.gateway.offline import ShiftedClock
from tests.waiting import until

BATCH_ID = "batch_1"
LINES = 12


class UnreliableStore(BatchStore):
    """A store whose answers get lost: before a write (`False`) or after it (`True`), as `faults` says."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.faults: list[bool] = []

    async def record(
        self, batch_id: str, name: str, start: int, end: int, results: Sequence[LineResult], token: str
    ) -> None:
        is_written = self.faults.pop(0) if self.faults else None
        if is_written is not False:
            await super().record(batch_id, name, start, end, results, token)
        if is_written is not None:
            raise StoreSilent


class UnreliableStorage(LocalStorage):
    """A storage that fails before a write (`False`) or after it (`True`), as `faults` says."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.faults: list[bool] = []

    async def append(self, name: str, position: int, data: bytes) -> None:
        is_written = self.faults.pop(0) if self.faults else None
        if is_written is not False:
            await super().append(name, position, data)
        if is_written is not None:
            raise DiskFull


async def make_batch(store: BatchStore, directory: Path) -> str:
    """Create a batch in progress. Return its owner's token."""
    await store.create(Batch(BATCH_ID, "/v1/x", "file-1", "24h", BatchStatus.IN_PROGRESS, 1, 2, total=LINES))
    (directory / "batches" / BATCH_ID).mkdir(parents=True)
    lock = store.owner_lock(BATCH_ID, 60.0)
    assert await lock.acquire()
    return bytes(lock.local.token or b"").decode()


def result(number: int, size: int = 2) -> LineResult:
    return LineResult(number, True, b"%d" % number + b" " * size, input_tokens=1)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("lines"), st.integers(1, 4)),
        st.tuples(st.just("store"), st.booleans()),
        st.tuples(st.just("storage"), st.booleans()),
        st.tuples(st.sampled_from(["crash", "save", "lose writes"]), st.none()),
    ),
    max_size=14,
)


@settings(max_examples=25)
@given(actions=ACTIONS)
async def test_every_line_is_recorded_once_whatever_fails(
    redis_client: Redis, actions: list[tuple[str, int | bool | None]]
) -> None:
    """A crash begins a new execution. The store may also lose what was written since it was saved."""
    await redis_client.flushdb()
    with tempfile.TemporaryDirectory() as directory:
        store, storage = UnreliableStore(redis_client), UnreliableStorage(Path(directory))
        files = FileStore(redis_client, storage.directory, ShiftedClock(), storage=storage)
        token = await make_batch(store, storage.directory)
        execution, saved = Execution(store, files, token), await snapshot(redis_client)
        for action, value in [*actions, ("crash", None), ("lines", LINES)]:
            match action:
                case "lines":
                    await execution.take(int(value or 0))
                    try:
                        await execution.flush()
                    except (StoreSilent, DiskFull):
                        pass
                    except OwnershipLost:
                        execution = Execution(store, files, token)
                case "crash":
                    execution = Execution(store, files, token)
                case "save":
                    saved = await snapshot(redis_client)
                case "lose writes":
                    await restore(redis_client, saved)
                case _:
                    (store if action == "store" else storage).faults.append(bool(value))
        store.faults, storage.faults = [], []
        await execution.flush()
        batch = await store.get(BATCH_ID)
        assert batch is not None and (batch.completed, batch.input_tokens) == (LINES, LINES)
        ids = await write_files(store, files, batch, None)
        content = (storage.directory / "files" / ids["output_file_id"]).read_bytes()
        assert [int(line) for line in content.splitlines()] == list(range(1, LINES + 1))


class Execution(ResultRecorder):
    """Computes the lines that are not done when it begins, each once."""

    def __init__(self, store: BatchStore, files: FileStore, token: str) -> None:
        super().__init__(BATCH_ID, store, files, ShiftedClock(), lambda: token)
        self._batch_store = store
        self._left: list[int] | None = None

    async def take(self, count: int) -> None:
        if self._left is None:
            done = await self._batch_store.finished_lines(BATCH_ID)
            self._left = [number for number in range(1, LINES + 1) if number not in done]
        for number in self._left[:count]:
            await self.add(result(number))
        del self._left[:count]


async def snapshot(redis: Redis) -> dict[str, bytes | None]:
    keys = GatewayKeys.of(redis)
    names = [key_of("batch_1") for key_of in (keys.batch, keys.batch_done, keys.batch_results)]
    return {name: await redis.dump(name) for name in names}


async def restore(redis: Redis, saved: dict[str, bytes | None]) -> None:
    """Take back what was written to the store since `snapshot`."""
    for key, value in saved.items():
        await redis.delete(key)
        if value is not None:
            await redis.restore(key, 0, value)


async def test_lines_wait_while_too_many_results_cannot_be_recorded(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And go on when they can: nothing is lost and nothing is computed again."""
    monkeypatch.setattr(recording, "BACKLOG_BYTES", 100)
    monkeypatch.setattr(recording, "RETRY_S", 0.0)
    store, storage = BatchStore(redis_client), UnreliableStorage(tmp_path)
    files = FileStore(redis_client, tmp_path, ShiftedClock(), storage=storage)
    token = await make_batch(store, tmp_path)
    storage.faults = [False] * 10_000
    recorder = ResultRecorder(BATCH_ID, store, files, ShiftedClock(), lambda: token)
    run = asyncio.create_task(recorder.run())
    adding = [asyncio.create_task(recorder.add(result(number, 40))) for number in range(1, 5)]
    await until(lambda: len(storage.faults) < 9_990)
    assert not any(task.done() for task in adding[2:])
    storage.faults.clear()
    async with asyncio.timeout(30):
        await asyncio.gather(*adding)
        await recorder.drained()
    run.cancel()
    assert [n for n in range(LINES) if n in await store.finished_lines(BATCH_ID)] == [1, 2, 3, 4]


async def test_results_are_collected_where_each_append_is_costly(redis_client: Redis, tmp_path: Path) -> None:
    class Costly(LocalStorage):
        collect_s = 3600.0
        appends = 0

        async def append(self, name: str, position: int, data: bytes) -> None:
            self.appends += 1
            await super().append(name, position, data)

    store, storage = BatchStore(redis_client), Costly(tmp_path)
    files = FileStore(redis_client, tmp_path, ShiftedClock(), storage=storage)
    token = await make_batch(store, tmp_path)
    recorder = ResultRecorder(BATCH_ID, store, files, ShiftedClock(), lambda: token)
    run = asyncio.create_task(recorder.run())
    for number in range(1, 5):
        await recorder.add(result(number))
        await asyncio.sleep(0)
    assert storage.appends == 0
    async with asyncio.timeout(30):
        await recorder.drained()
    run.cancel()
    assert storage.appends == 1
