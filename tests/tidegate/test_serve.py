"""`serve`: what it decides before its parts run, and how it knows that its worker is ready."""

from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from scheduler.config import load_tiers
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.registry.worker_status import WorkerStatus
from scheduler.reload.store import Follower, TierStore
from scheduler.store import connection
from tests.system.server import free_port
from tidegate import serve
from tidegate.serve import run_serve, served_parts, start_text, with_address
from tidegate.settings.commands import ServeSettings
from tidegate.supervision.keeper import Part
from tidegate.supervision.process import gateway_name, worker_name


def status(worker_id: str) -> WorkerStatus:
    return WorkerStatus(worker_id=worker_id, model_names=("m",), max_model_len=8, vocab_size=8, started_ms=0)


@pytest.mark.parametrize("url", ["redis://user:sesame@127.0.0.1:{}/3", "unix:///nowhere/{}.sock"])
def test_a_store_that_does_not_answer_is_named_without_its_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRIES", 1)  # the default takes two seconds
    with capture_logs() as logs:
        assert run_serve(ServeSettings(redis_url=url.format(free_port()))) == 78
    assert [line["event"] for line in logs] == ["cannot start"]
    assert logs[0]["reason"].startswith("the store at ")
    assert "sesame" not in logs[0]["reason"]


def test_the_embedded_store_takes_twice_its_budget_and_evicts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def supervise(parts: list[Part], *_: object) -> int:
        started.extend(parts)
        return 0

    started: list[Part] = []
    monkeypatch.setattr(serve, "_supervise", supervise)
    assert run_serve(ServeSettings(port=0, data_dir=tmp_path, store_mb=64)) == 0
    flags = started[0].argv[1:]
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    assert (options["--maxmemory"], options["--maxmemory-policy"]) == ("128mb", "noeviction")
    assert started[0].hint == f"{tmp_path / 'valkey.log'} says why"


def test_workers_of_two_servers_have_two_names() -> None:
    one = free_port()
    other = next(port for port in iter(free_port, None) if port != one)
    first, again, second = (with_address(ServeSettings(port=port)).worker_id for port in (one, one, other))
    assert first == again
    assert first != second
    assert with_address(ServeSettings(port=one, worker_id="mine")).worker_id == "mine"


def test_an_unusable_host_is_named(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert run_serve(ServeSettings(port=0, host="192.0.2.1", data_dir=tmp_path)) == 78
    assert "cannot listen on 192.0.2.1" in logs[0]["reason"]


async def test_what_a_killed_worker_has_announced_is_withdrawn_before_its_successor_starts(redis_client: Redis) -> None:
    registry = RedisWorkerRegistry(redis_client)
    for worker_id in ("mine", "other"):
        await registry.announce(status(worker_id))
    part, _ = served_parts(with_address(ServeSettings(port=0, worker_id="mine")), redis_client)
    assert part.before_start is not None
    await part.before_start()
    assert [w.worker_id for w in await registry.workers()] == ["other"]


async def test_a_killed_part_does_not_count_as_a_follower_of_the_tiers(redis_client: Redis) -> None:
    tiers = TierStore(redis_client)
    settings = with_address(ServeSettings(port=0, worker_id="mine"))
    for name in (worker_name("mine"), gateway_name(settings.port), worker_name("other")):
        await tiers.report(Follower(name))
    for part in served_parts(settings, redis_client):
        assert part.before_start is not None
        await part.before_start()
    assert [f.part for f in await tiers.followers()] == ["worker other"]


def test_the_start_says_where_to_look_first_and_what_is_served_on_what_to_whom() -> None:
    settings = ServeSettings(port=8123)
    console, serves, engine, *_ = start_text(settings, load_tiers(settings.tiers_path), ["cuda:0"]).splitlines()
    assert console.endswith(":8123/")
    assert "tidegate-demo" in serves and ":8123/v1" in serves and "without API keys" in serves
    assert "native on cuda:0" in engine and "realtime 500 ms" in engine


def test_the_start_names_no_console_where_there_is_none() -> None:
    settings = ServeSettings(port=8123, console=False, api_key="secret")  # type: ignore[arg-type]
    text = start_text(settings, load_tiers(settings.tiers_path), [])
    assert "Console" not in text and "with API keys" in text and "secret" not in text
