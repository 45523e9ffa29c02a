"""The batch store: only legal transitions, each result once, no writes by a former owner."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.jobs.batches.model import TRANSITIONS, Batch, BatchStatus, LineResult
from gateway.jobs.batches.store import BatchStore, Moved, OwnershipLost
from gateway.store_keys import GatewayKeys

S = BatchStatus


def make_batch(batch_id: str = "batch_1") -> Batch:
    return Batch(batch_id, "/v1/completions", "file-1", "24h", S.VALIDATING, 100, 200, metadata={"a": "ü"})


def make_result(number: int, succeeded: bool = True) -> LineResult:
    return LineResult(number, succeeded, b"{}", 5, 1, 2, 0)


@pytest.fixture
def store(redis_client: Redis) -> BatchStore:
    return BatchStore(redis_client)


async def owner_of(store: BatchStore, batch_id: str) -> str:
    lock = store.owner_lock(batch_id, 60.0)
    assert await lock.acquire()
    return bytes(lock.local.token or b"").decode()


@pytest.fixture
async def token(store: BatchStore) -> str:
    """Create `batch_1`. Return the token of its owner."""
    await store.create(make_batch())
    return await owner_of(store, "batch_1")


@settings(max_examples=40)
@given(targets=st.lists(st.sampled_from(list(S)), max_size=8))
async def test_only_transitions_of_the_table_happen(redis_client: Redis, targets: list[BatchStatus]) -> None:
    await redis_client.flushdb()
    store = BatchStore(redis_client)
    await store.create(make_batch())
    status = S.VALIDATING
    entered: dict[str, int] = {}
    for now, target in enumerate(targets, start=101):
        moved = await store.move("batch_1", target, now)
        assert (moved is Moved.MOVED) == (target in TRANSITIONS[status] or target is status)
        if target in TRANSITIONS[status]:
            status = target
            entered[f"{target.value}_at"] = now
    batch = await store.get("batch_1")
    assert batch is not None and batch.status is status
    times = {f"{s.value}_at": getattr(batch, f"{s.value}_at") for s in S if s is not S.VALIDATING}
    assert {name: at for name, at in times.items() if at is not None} == entered
    counts = await store.counts_by_status()
    assert {s for s, n in counts.items() if n} == {status} and sum(counts.values()) == 1


async def test_a_group_of_results_counts_once(store: BatchStore, token: str) -> None:
    for _ in range(2):  # redis-py may send a script twice
        await store.record("batch_1", "r1", 0, 20, [make_result(1), make_result(2, False)], token)
    await store.record("batch_1", "r1", 20, 30, [make_result(40)], token)
    batch = await store.get("batch_1")
    assert batch is not None
    assert (batch.completed, batch.failed, batch.input_tokens, batch.output_tokens) == (2, 1, 15, 6)
    done = await store.finished_lines("batch_1")
    assert [number for number in range(1000) if number in done] == [1, 2, 40]
    assert await store.results("batch_1") == {"r1": 30}


async def test_a_group_that_does_not_fit_to_what_the_store_knows_is_refused_whole(
    store: BatchStore, token: str
) -> None:
    """As after a crash of the store, which then has lost its latest writes."""
    await store.record("batch_1", "r1", 0, 10, [make_result(1)], token)
    for name, start, numbers in (("r1", 20, [2]), ("r1", 0, [2]), ("r2", 0, [2, 1])):
        with pytest.raises(OwnershipLost):
            await store.record("batch_1", name, start, 30, [make_result(n) for n in numbers], token)
    assert await store.results("batch_1") == {"r1": 10}
    batch = await store.get("batch_1")
    assert batch is not None and batch.completed == 1
    assert 2 not in await store.finished_lines("batch_1")


async def test_a_former_owner_changes_nothing(store: BatchStore, token: str, redis_client: Redis) -> None:
    await redis_client.delete(GatewayKeys.of(redis_client).batch_owner("batch_1"))  # as if the lock had expired
    fresh = await owner_of(store, "batch_1")
    with pytest.raises(OwnershipLost):
        await store.record("batch_1", "r1", 0, 10, [make_result(1)], token)
    with pytest.raises(OwnershipLost):
        await store.forget_work("batch_1", token, 300)
    assert await store.move("batch_1", S.IN_PROGRESS, 101, token=token) is Moved.NOT_OWNER
    assert 1 not in await store.finished_lines("batch_1") and await store.results("batch_1") == {}
    assert await store.move("batch_1", S.IN_PROGRESS, 101, token=fresh, total=4) is Moved.MOVED
    batch = await store.get("batch_1")
    assert batch is not None and (batch.status, batch.total) == (S.IN_PROGRESS, 4)


async def test_a_batch_that_is_withdrawn_while_another_gateway_runs_it_leaves_nothing(
    store: BatchStore, token: str, redis_client: Redis
) -> None:
    """Gateways with one storage adopt a batch as soon as its record is there, before it is known to be durable."""
    await store.record("batch_1", "r1", 0, 10, [make_result(1)], token)
    await store.remove("batch_1", make_batch().owner, if_over=False)
    for first, last in ((10, 20), (0, 10)):
        with pytest.raises(OwnershipLost):
            await store.record("batch_1", "r1", first, last, [make_result(2)], token)
    assert await store.get("batch_1") is None
    keys = GatewayKeys.of(redis_client)
    assert await redis_client.keys(f"{keys.prefix}batch*:batch_1") == [keys.batch_owner("batch_1").encode()]


async def test_forgetting_leaves_only_the_record(store: BatchStore, token: str, redis_client: Redis) -> None:
    await store.record("batch_1", "r1", 0, 10, [make_result(1)], token)
    assert await store.move("batch_1", S.FAILED, 101) is Moved.MOVED
    assert await store.forget_work("batch_1", token, 300)
    assert await store.unfinished() == []
    keys = GatewayKeys.of(redis_client)
    assert await redis_client.keys(f"{keys.prefix}batches:*:batch_1") == [keys.batch_owner("batch_1").encode()]
    assert await store.get("batch_1") is not None


async def test_a_batch_that_is_not_over_keeps_its_results(store: BatchStore, token: str) -> None:
    await store.record("batch_1", "r1", 0, 10, [make_result(1)], token)
    assert not await store.forget_work("batch_1", token, 300)
    assert await store.unfinished() == ["batch_1"] and 1 in await store.finished_lines("batch_1")
    assert await store.results("batch_1") == {"r1": 10}
    for target in (S.IN_PROGRESS, S.FINALIZING, S.COMPLETED):
        await store.move("batch_1", target, 101)
    assert await store.forget_work("batch_1", token, 300)
