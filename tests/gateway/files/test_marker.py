"""A storage and its store: whatever does not belong together is refused, and nothing of it is removed."""

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from gateway.files.local_storage import LocalStorage
from gateway.files.marker import NAME, ForeignStorage, Marker, StorageTie
from gateway.files.object_storage import ObjectStorage
from gateway.files.storage import Storage
from gateway.files.store import MAX_ORPHANS, ORPHAN_S, FileStore
from gateway.jobs.batches.maintenance import SWEEP_S, BatchMaintenance
from gateway.jobs.batches.store import BatchStore
from gateway.store_keys import GatewayKeys
from tests.scheduler.queue.harness import ManualClock

DAY_S = 86_400.0


class Site:
    """A store and a storage with five files and the folder of a batch; and what a gateway does with them."""

    def __init__(self, redis: Redis, directory: Path) -> None:
        self.redis = redis
        self.keys = GatewayKeys.of(redis)
        self.clock = ManualClock()
        self.open(LocalStorage(directory))

    def open(self, storage: Storage) -> None:
        """Use `storage` from now on."""
        self.files = FileStore(self.redis, storage.directory, self.clock, storage=storage)
        store = BatchStore(self.redis)
        self.maintenance = BatchMaintenance(store, self.files, _no_run, self.clock, 1.0, _nothing, 3600, ())

    @property
    def contents(self) -> set[str]:
        return {p.name for folder in ("files", "batches") for p in (self.files.data_dir / folder).iterdir()}

    async def fill(self) -> set[str]:
        """Store five files and a batch's folder, which all look ten days old. Return their names."""
        paths = [self.files.incoming / str(number) for number in range(5)]
        for path in paths:
            path.write_bytes(b"x")
        await asyncio.gather(*(self.files.add(path, filename="x", purpose="batch", owner=None) for path in paths))
        await self.redis.hset(self.keys.batch("batch_1"), "status", "in_progress")
        (self.files.data_dir / "batches" / "batch_1").mkdir(parents=True)
        self.age()
        return self.contents

    def age(self, days: float = 10) -> None:
        """Let all contents look so many days old."""
        then = self.clock.wall_ms() / 1000 - days * DAY_S
        for name in self.contents:
            folder = "batches" if name.startswith("batch") else "files"
            os.utime(self.files.data_dir / folder / name, (then, then))

    async def sweep(self) -> None:
        await self.maintenance.sweep_orphans()


def _no_run(batch_id: str) -> object:
    raise AssertionError("no batch runs here")


async def _nothing() -> None:
    pass


@pytest.fixture
async def site(redis_client: Redis, tmp_path: Path) -> Site:
    return Site(redis_client, tmp_path / "data")


async def lose_everything(site: Site) -> None:
    await site.redis.flushdb()


async def lose_the_last_day(site: Site) -> None:
    """Set the store back to what it was before the storage was last seen, without its records."""
    before = await site.redis.get(site.keys.storage)
    site.clock.advance(DAY_S)
    await site.files.tie.check()
    await site.redis.flushdb()
    await site.redis.set(site.keys.storage, before)


async def become_another(site: Site) -> None:
    await site.redis.flushdb()
    await StorageTie(site.redis, LocalStorage(site.files.data_dir.parent), site.clock).check()


async def lose_the_storages_marker(site: Site) -> None:
    (site.files.data_dir / NAME).unlink()


async def damage_the_marker(site: Site) -> None:
    (site.files.data_dir / NAME).write_bytes(b"{")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lose_everything, "has lost its data"),
        (lose_the_last_day, "set back: it is at least 24.0 hours older"),
        (become_another, "another store"),
        (lose_the_storages_marker, "this storage has lost its data"),
        (damage_the_marker, "cannot be read"),
    ],
)
async def test_what_does_not_belong_together_is_refused_and_nothing_is_removed(
    site: Site, change: Callable[[Site], Awaitable[None]], reason: str
) -> None:
    await site.files.tie.check()
    contents = await site.fill()
    await change(site)
    with pytest.raises(ForeignStorage, match=reason) as refused:
        await site.files.tie.check()
    assert "tidegate adopt" in str(refused.value) and str(site.files.data_dir) in str(refused.value)
    site.clock.advance(30 * DAY_S)
    await site.sweep()
    assert site.contents == contents


async def test_a_gateway_that_runs_says_within_a_minute_that_the_store_has_lost_its_data(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    await site.maintenance.warn_of_lost_data()  # neither has a marker yet
    await site.files.tie.check()
    await site.maintenance.warn_of_lost_data()
    assert caplog.messages == [f"the storage {site.files.data_dir} is tied to the store"]
    await lose_everything(site)
    await site.maintenance.warn_of_lost_data()
    assert "has lost its data" in caplog.messages[-1] and "tidegate adopt" in caplog.messages[-1]
    assert SWEEP_S <= 60.0
    await site.files.tie.adopt()
    caplog.clear()
    await site.maintenance.warn_of_lost_data()
    assert caplog.messages == []


async def test_an_adopted_storage_keeps_what_the_store_does_not_know_for_a_week(site: Site) -> None:
    await site.files.tie.check()
    contents = await site.fill()
    await site.redis.flushdb()
    await site.files.tie.adopt()
    site.clock.advance(ORPHAN_S - 1)
    await site.sweep()
    assert site.contents == contents
    site.clock.advance(2)
    await site.sweep()
    assert site.contents == set()


@pytest.mark.parametrize("knows", [True, False])
async def test_a_storage_without_a_marker_is_tied_if_the_store_knows_its_files(site: Site, knows: bool) -> None:
    contents = await site.fill()  # as an earlier version left it
    if not knows:
        await site.redis.flushdb()
        with pytest.raises(ForeignStorage, match="knows none"):
            await site.files.tie.check()
    else:
        await site.files.tie.check()
        await site.sweep()
    assert site.contents == contents


async def test_the_tie_holds_through_restarts_and_lost_seconds(site: Site) -> None:
    first = await site.files.tie.check()
    before = await site.redis.get(site.keys.storage)
    site.clock.advance(60)
    again = await site.files.tie.check()
    assert (again.id, again.tied_s, again.seen_s) == (first.id, first.tied_s, first.seen_s + 60)
    await site.redis.set(site.keys.storage, before)  # a failover has lost the last write
    assert (await site.files.tie.check()).id == first.id


@pytest.mark.parametrize("in_storage", [True, False])
async def test_a_tie_that_was_cut_off_is_completed(site: Site, in_storage: bool) -> None:
    marker = await site.files.tie.check()
    if not in_storage:
        (site.files.data_dir / NAME).unlink()
    await site.redis.set(
        site.keys.storage, msgspec.json.encode(Marker(marker.id, marker.tied_s, marker.seen_s, is_new=True))
    )
    assert (await site.files.tie.check()).id == marker.id
    assert (await site.files.tie.check()).id == marker.id


async def test_a_sweep_removes_old_contents_without_a_record_up_to_a_bound(site: Site) -> None:
    await site.files.tie.check()
    kept = await site.fill()
    site.clock.advance(2 * ORPHAN_S)
    folder = site.files.data_dir / "files"
    for number in range(MAX_ORPHANS + 1):
        (folder / f"file-lost{number}").touch()
    site.age(8)
    (folder / "file-new").touch()
    now = site.clock.wall_ms() / 1000
    os.utime(folder / "file-new", (now, now))
    await site.sweep()
    assert len(site.contents - kept) == 2
    await site.sweep()
    assert site.contents - kept == {"file-new"}


async def test_an_object_storage_is_tied_as_well(site: Site, tmp_path: Path) -> None:
    site.open(ObjectStorage(f"memory://{tmp_path.name}", tmp_path / "copies"))
    marker = await site.files.tie.check()
    shutil.rmtree(tmp_path / "copies")
    site.open(ObjectStorage(f"memory://{tmp_path.name}", tmp_path / "elsewhere"))  # another machine
    assert (await site.files.tie.check()).id == marker.id
    await site.redis.flushdb()
    with pytest.raises(ForeignStorage, match=f"memory://{tmp_path.name}"):
        await site.files.tie.check()
