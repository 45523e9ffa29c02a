"""`tidegate adopt`, on an embedded store and on one that somebody else runs."""

import asyncio
from pathlib import Path

import pytest

from gateway.files.local_storage import LocalStorage
from gateway.files.marker import ForeignStorage, StorageTie
from scheduler.clock import SystemClock
from scheduler.store import connection
from tidegate.adopt import run_adopt
from tidegate.settings.gateway import GatewaySettings
from tidegate.valkey import running_valkey


async def check(url: str, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    async with connection.connect(url) as redis:
        await StorageTie(redis, LocalStorage(directory), SystemClock()).check()


async def refused(url: str, directory: Path) -> bool:
    try:
        await check(url, directory)
    except ForeignStorage:
        return True
    return False


async def test_a_storage_that_was_refused_is_accepted_after_its_adoption(
    valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await check(valkey_url, tmp_path / "first")
    assert await refused(valkey_url, tmp_path / "other")
    settings = GatewaySettings(redis_url=valkey_url, data_dir=tmp_path / "other")
    assert await asyncio.to_thread(run_adopt, settings) == 0
    assert f"The storage {tmp_path / 'other'} is tied" in capsys.readouterr().out
    assert not await refused(valkey_url, tmp_path / "other")
    assert await refused(valkey_url, tmp_path / "first")


def test_without_an_url_it_is_the_embedded_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_adopt(GatewaySettings(data_dir=tmp_path)) == 0
    with running_valkey(tmp_path):
        assert run_adopt(GatewaySettings(data_dir=tmp_path)) == 78  # a server is running
    assert str(tmp_path) in capsys.readouterr().err


async def test_a_storage_that_is_not_there_is_not_adopted(
    valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its --data-dir, the command would tie the store to a new folder where it runs, and lock gateways out."""
    await check(valkey_url, tmp_path / "first")
    for settings in (
        GatewaySettings(redis_url=valkey_url, data_dir=tmp_path / "none"),
        GatewaySettings(redis_url=valkey_url, files_url=f"file://{tmp_path}/none", data_dir=tmp_path),
        GatewaySettings(data_dir=tmp_path / "none"),
    ):
        assert await asyncio.to_thread(run_adopt, settings) == 78
        assert f"there is no directory {tmp_path / 'none'}: give" in capsys.readouterr().err
        assert not (tmp_path / "none").exists()
    assert not await refused(valkey_url, tmp_path / "first")
