"""`tidegate backup` and `tidegate restore` on a real store: what was there is there again, and batches go on."""

import asyncio
import json
import secrets
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.files.marker import ForeignStorage, StorageTie
from gateway.files.object_storage import open_storage
from gateway.files.storage import Storage
from gateway.files.store import FileStore
from gateway.http.metrics import GatewayMetrics
from gateway.keys.usage import Owner, UsageMeter, Use
from gateway.store_keys import GatewayKeys
from scheduler.clock import SystemClock
from scheduler.queue.redis import RedisQueue
from scheduler.reload.store import Follower, TierStore
from scheduler.store import connection
from scheduler.store.keys import Keys
from tests.gateway.offline import ScriptedCompletions, jsonl, lines, running_gateway
from tests.stores import Store
from tests.waiting import until
from tidegate.backup.command import run_backup, run_restore
from tidegate.backup.contents import save
from tidegate.settings.commands import BackupSettings, RestoreSettings
from tidegate.valkey import running_valkey


class Site:
    """One deployment: its store, and its storage of files in a directory or elsewhere."""

    def __init__(self, url: str | None, folder: Path, files_url: str | None = None) -> None:
        self.folder = folder
        self.flags = {"redis_url": url, "data_dir": folder / "data", "files_url": files_url}

    @property
    def storage(self) -> Storage:
        return open_storage(self.flags["files_url"], self.folder / "data")  # type: ignore[arg-type]

    async def backup(self, name: str = "backup") -> int:
        settings = BackupSettings(directory=self.folder / name, **self.flags)  # type: ignore[arg-type]
        return await asyncio.to_thread(run_backup, settings)

    async def restore(self, folder: Path, replace: str | None = None) -> int:
        saved = None if replace is None else self.folder / replace
        settings = RestoreSettings(directory=folder, replace=saved, **self.flags)  # type: ignore[arg-type]
        return await asyncio.to_thread(run_restore, settings)


@pytest.fixture(params=["directory", "object store"])
def files_url(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "directory" else f"memory://{secrets.token_hex(4)}"


def usage(redis: Redis) -> UsageMeter:
    return UsageMeter(redis, GatewayMetrics(), SystemClock())


async def test_files_usage_and_batches_are_there_again_and_an_unfinished_batch_goes_on(
    redis_client: Redis, valkey_url: str, tmp_path: Path, files_url: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(valkey_url, tmp_path, files_url)
    before, after = ScriptedCompletions(), ScriptedCompletions()
    before.permits = asyncio.Semaphore(7)
    another = f"another:{GatewayKeys.of(redis_client).prefix}key"  # in the same slot of a cluster
    await redis_client.set(another, "its own")
    async with running_gateway(redis_client, site.storage.directory, completions=before, storage=site.storage) as one:
        over = await one.submit(lines(3))
        ended = await one.ended(over.id)
        going = await one.submit(lines(12))
        await one.answered(going.id, 4)
        meter = usage(redis_client)
        meter.record(Owner("web"), "bulk", Use(requests=3, prompt_tokens=40))
        await meter.flush()
        counted = await meter.days(1)
        assert await site.backup() == 0, capsys.readouterr().err
        written = await one.read(ended.output_file_id)
    await lose_everything(redis_client, site)
    assert await redis_client.get(another) == b"its own"
    assert await site.restore(tmp_path / "backup") == 0, capsys.readouterr().err
    assert await redis_client.get(another) == b"its own"
    async with running_gateway(redis_client, site.storage.directory, completions=after, storage=site.storage) as two:
        assert await two.read(ended.output_file_id) == written and len(written) == 3
        assert await usage(redis_client).days(1) == counted
        finished = await two.ended(going.id)
        assert finished.request_counts is not None and finished.request_counts.completed == 12
        entries = await two.read(finished.output_file_id)
        assert sorted(entry["custom_id"] for entry in entries) == sorted(f"q{n}" for n in range(12))
        listed = [batch.id async for batch in two.client.batches.list()]
    assert listed == [going.id, over.id]
    assert len(after.answered) == 8, "recorded lines are not run again"


async def lose_everything(redis: Redis, site: Site) -> None:
    """Remove the deployment's keys and its storage."""
    async for key in redis.scan_iter(f"{GatewayKeys.of(redis).prefix}*"):
        await redis.delete(key)
    storage = site.storage
    await storage.remove([f"files/{entry.name}" for entry in await storage.entries("files")])
    for entry in await storage.entries("batches"):
        await storage.remove_folder(f"batches/{entry.name}")
    assert await storage.entries("files") == await storage.entries("batches") == []


async def with_file(site: Site, redis: Redis, text: bytes) -> str:
    """Add a file with this content. Return its id."""
    files = FileStore(redis, site.folder / "data", SystemClock(), storage=site.storage)
    content = files.incoming / "content"
    content.write_bytes(text)
    return (await files.add(content, filename="in.jsonl", purpose="batch", owner=None)).id


async def test_a_store_that_is_not_empty_is_replaced_only_after_a_backup_of_it(
    redis_client: Redis, valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(valkey_url, tmp_path)
    old = await with_file(site, redis_client, jsonl(lines(1)))
    assert await site.backup() == 0
    new = await with_file(site, redis_client, jsonl(lines(2)))
    assert await site.restore(tmp_path / "backup") == 78
    assert "not empty" in capsys.readouterr().err
    assert await files_of(redis_client, site) == {old: 1, new: 2}
    assert await site.restore(tmp_path / "backup", replace="backup") == 78, "the folder of another backup"
    assert await files_of(redis_client, site) == {old: 1, new: 2}
    assert await site.restore(tmp_path / "backup", replace="saved") == 0
    assert await files_of(redis_client, site) == {old: 1}
    assert await site.restore(tmp_path / "saved", replace="saved again") == 0
    assert await files_of(redis_client, site) == {old: 1, new: 2}


async def files_of(redis: Redis, site: Site) -> dict[str, int]:
    """Return the files that the store has, by id, with the number of lines that the storage has of each."""
    files = FileStore(redis, site.folder / "data", SystemClock(), storage=site.storage)
    page = await files.page(owner=None, limit=100)
    assert page is not None
    paths = {file.id: await files.storage.fetch(f"files/{file.id}", file.sha256) for file in page.items}
    return {file_id: path.read_bytes().count(b"\n") for file_id, path in paths.items()}


async def test_parts_that_run_and_another_deployment_are_refused(
    redis_client: Redis, valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(valkey_url, tmp_path)
    await with_file(site, redis_client, jsonl(lines(1)))
    assert await site.backup() == 0
    await TierStore(redis_client).report(Follower("gateway host:8000"))
    assert await site.restore(tmp_path / "backup") == 78
    assert "gateway host:8000" in capsys.readouterr().err
    await TierStore(redis_client).leave("gateway host:8000")
    await RedisQueue(redis_client, SystemClock()).probe()  # of a gateway whose models vote on their tiers elsewhere
    assert await site.restore(tmp_path / "backup") == 78
    assert "stop all gateways" in capsys.readouterr().err
    await redis_client.delete(Keys.of(redis_client).probe)
    other = Site(f"{valkey_url}?deployment=other", tmp_path / "other")
    assert await other.restore(tmp_path / "backup") == 78
    assert f"{GatewayKeys.of(redis_client).prefix!r}" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["backup.json", "store.msgpack", "files"])
async def test_a_backup_that_is_not_whole_changes_nothing(
    redis_client: Redis, valkey_url: str, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(valkey_url, tmp_path)
    file_id = await with_file(site, redis_client, jsonl(lines(1)))
    assert await site.backup() == 0
    path = tmp_path / "backup" / damage
    if damage == "files":
        (path / file_id).write_bytes(b"x" * (path / file_id).stat().st_size)
    elif damage == "store.msgpack":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    assert await site.restore(tmp_path / "backup", replace="saved") == 78
    assert damage in capsys.readouterr().err
    assert await files_of(redis_client, site) == {file_id: 1}
    assert not (tmp_path / "saved").exists()


async def test_a_content_that_the_storage_has_lost_is_named_and_the_rest_is_saved(
    redis_client: Redis, valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(valkey_url, tmp_path)
    lost, kept = [await with_file(site, redis_client, jsonl(lines(count))) for count in (1, 2)]
    (tmp_path / "data" / "files" / lost).unlink()
    assert await site.backup() == 0
    assert lost in capsys.readouterr().out
    listing = json.loads((tmp_path / "backup" / "backup.json").read_text())
    assert listing["missing"] == [f"files/{lost}"]
    await redis_client.flushall()
    assert await site.restore(tmp_path / "backup") == 0
    assert (tmp_path / "data" / "files" / kept).exists()


async def test_a_file_that_is_deleted_while_it_is_copied_is_not_in_the_backup(
    redis_client: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(valkey_url, tmp_path)
    gone, kept = [await with_file(site, redis_client, jsonl(lines(count))) for count in (1, 2)]
    looks = []

    async def save_after_a_deletion(*args: object) -> list[str]:
        looks.append(args)
        if len(looks) == 1:
            async with connection.connect(valkey_url) as redis:
                assert await FileStore(redis, tmp_path / "data", SystemClock()).delete(gone, owner=None)
        return await save(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("tidegate.backup.contents.save", save_after_a_deletion)
    assert await site.backup() == 0
    listing = json.loads((tmp_path / "backup" / "backup.json").read_text())
    assert len(looks) == 2 and "missing" not in listing
    assert [content["name"] for content in listing["contents"]] == [f"files/{kept}"]


async def test_a_restore_that_ends_half_way_is_served_by_no_gateway(
    redis_client: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(valkey_url, tmp_path)
    await with_file(site, redis_client, jsonl(lines(1)))
    assert await site.backup() == 0
    await lose_everything(redis_client, site)

    async def die(*_: object) -> None:
        raise ConnectionResetError("the machine has lost its power")

    with monkeypatch.context() as patched:
        patched.setattr("gateway.files.marker.StorageTie.adopt", die)
        assert await site.restore(tmp_path / "backup") == 1
    with pytest.raises(ForeignStorage):
        await StorageTie(redis_client, site.storage, SystemClock()).check()
    assert await site.restore(tmp_path / "backup", replace="half") == 0
    await StorageTie(redis_client, site.storage, SystemClock()).check()


@pytest.mark.parametrize("name", ["data", "a" * 100])
async def test_the_embedded_store_is_saved_while_it_runs_and_while_it_does_not(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long path has its socket elsewhere."""
    site = Site(None, tmp_path / name)
    with running_valkey(tmp_path / name / "data") as url:
        async with connection.connect(url) as redis:
            file_id = await with_file(site, redis, jsonl(lines(1)))
        assert await site.backup("hot") == 0
        assert await site.restore(site.folder / "hot", replace="saved") == 78
        assert "in use by process" in capsys.readouterr().err
    assert await site.backup("cold") == 0
    fresh = Site(None, tmp_path / name / "fresh")
    for folder in ("hot", "cold"):
        replace = None if folder == "hot" else "first"
        assert await fresh.restore(site.folder / folder, replace) == 0
        with running_valkey(fresh.folder / "data") as url:
            async with connection.connect(url) as redis:
                assert await files_of(redis, fresh) == {file_id: 1}


async def test_a_backup_of_what_is_no_server_fails_and_leaves_nothing(
    redis_client: Redis, valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job in the wrong directory, or with another store, must not end as if all had been saved."""
    nowhere, empty = Site(None, tmp_path / "nowhere"), Site(valkey_url, tmp_path / "empty")
    assert await nowhere.backup() == 78
    assert "is no data directory of a server: --data-dir" in capsys.readouterr().err
    assert await empty.backup() == 78
    assert "nothing of the deployment" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "empty").exists()


async def test_a_backup_with_another_storage_than_that_of_the_store_fails(
    redis_client: Redis, valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(valkey_url, tmp_path)
    site.storage.directory.mkdir()
    await StorageTie(redis_client, site.storage, SystemClock()).check()
    assert await site.backup("of a server that nobody has used yet") == 0
    await with_file(site, redis_client, jsonl(lines(1)))
    assert await Site(valkey_url, tmp_path / "another").backup() == 78
    assert "--files-url or --data-dir" in capsys.readouterr().err
    assert not (tmp_path / "another").exists()
    assert await site.backup() == 0


async def test_what_expires_keeps_its_time_and_what_has_expired_is_gone(
    redis_client: Redis, valkey_url: str, valkey_server: Store, tmp_path: Path
) -> None:
    site, prefix = Site(valkey_url, tmp_path), GatewayKeys.of(redis_client).prefix
    at_ms = SystemClock().wall_ms()
    await redis_client.set(f"{prefix}usage:a", "1", pxat=at_ms + 3_600_000)
    await redis_client.set(f"{prefix}usage:b", "1", pxat=at_ms + 60)
    await redis_client.set(f"{prefix}gateway:one", "1")
    await redis_client.set(f"{prefix}tasks:ended:t", "1")
    assert await site.backup() == 0
    await redis_client.flushall()
    await until(lambda: SystemClock().wall_ms() > at_ms + 60)
    assert await site.restore(tmp_path / "backup") == 0
    keys = set(valkey_server.stored()) - {f"{prefix}storage", f"{prefix}durable"}
    assert keys == {f"{prefix}usage:a", f"{prefix}tasks:ended:t"}
    assert await redis_client.pexpiretime(f"{prefix}usage:a") == at_ms + 3_600_000
