"""Keys from a file and from the environment, and the file's changes while a gateway runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from gateway.keys.file import KeyringError
from gateway.keys.source import KeySource
from gateway.protocol.errors import ApiError
from scheduler.clock import SystemClock
from tests.gateway.stand import make_tiers
from tests.waiting import until

ONE = "keys: [{name: one, sha256: 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae}]"  # foo
TWO = "keys: [{name: two, sha256: fcde2b2edba56bf408601fb721fe9b5c338d10ee429ea04fae5511b68fbf8fb9}]"  # bar


class FastClock(SystemClock):
    """The system's clock, on which a second of sleep is one of a thousand."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 1000)


def source_of(path: Path | None, *operator_keys: str) -> KeySource:
    return KeySource(path, operator_keys, make_tiers, FastClock())


def accepts(source: KeySource, secret: str) -> bool:
    try:
        source.keyring.authenticate(f"Bearer {secret}")
    except ApiError:
        return False
    return True


def replace_file(path: Path, text: str) -> None:
    """Write `text` to the file at once: a source that follows the file never sees a part of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@asynccontextmanager
async def following(source: KeySource) -> AsyncIterator[None]:
    task = asyncio.create_task(source.follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), "nothing ends the task but its cancellation"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    file.write_text(ONE)
    return file


@pytest.mark.parametrize("broken", ["keys: [", "keys: [{name: one}]", "keys: [{name: a, key: b, tiers: [gold]}]", None])
async def test_a_broken_file_keeps_the_old_keys_and_says_so(path: Path, broken: str | None) -> None:
    source = source_of(path)
    with structlog.testing.capture_logs() as logs:
        async with following(source):
            replace_file(path, broken) if broken is not None else path.unlink()
            await until(lambda: bool(source.problem))
            assert accepts(source, "foo")
            assert str(path) in source.problem
            replace_file(path, TWO)
            await until(lambda: not source.problem)
    assert accepts(source, "bar")
    assert [log["event"] for log in logs] == [
        "the API keys are refused; the old ones stay in force",
        "the API keys have changed",
    ]


async def test_keys_of_the_environment_are_the_operators_and_stay(path: Path) -> None:
    source = source_of(path, "sk-old", "sk-new")
    path.write_text(TWO)
    for _ in range(2):  # the second time, nothing has changed
        await source.reload()
    found = [source.keyring.authenticate(f"Bearer {secret}") for secret in ("sk-old", "sk-new")]
    assert [(key.name, key.role, key.is_limited) for key in found if key] == [("operator", "admin", False)] * 2
    assert accepts(source, "bar")


def test_the_name_of_the_operator_cannot_be_taken(path: Path) -> None:
    path.write_text("keys: [{name: operator, key: sk-x}]")
    assert accepts(source_of(path), "sk-x")
    with pytest.raises(KeyringError, match="'operator'"):
        source_of(path, "sk-op")
