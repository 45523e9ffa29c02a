"""`serve`: what it decides before its parts run, and how it knows that its worker is ready."""

import socket

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.registry.worker_status import WorkerStatus
from scheduler.reload.store import Follower, TierStore
from scheduler.store import connection
from tidegate.process import gateway_name, worker_name
from tidegate.serve import Announced, _gateway, _worker, run_serve, with_address
from tidegate.settings import ServeSettings


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def status(worker_id: str) -> WorkerStatus:
    return WorkerStatus(worker_id=worker_id, model_names=("m",), max_model_len=8, vocab_size=8, started_ms=0)


@pytest.mark.parametrize(
    "url", ["redis://user:sesame@127.0.0.1:{}/3", "unix:///nowhere/{}.sock", "http://127.0.0.1:{}"]
)
def test_a_store_that_does_not_answer_is_named_without_its_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRIES", 1)  # the default takes two seconds
    with capture_logs() as logs:
        assert run_serve(ServeSettings(redis_url=url.format(free_port()))) == 78
    assert [line["event"] for line in logs] == ["cannot start"]
    assert logs[0]["reason"].startswith("the store at ")
    assert "sesame" not in logs[0]["reason"]


def test_workers_of_two_servers_have_two_names() -> None:
    first, again, second = (with_address(ServeSettings(port=port)).worker_id for port in (8000, 8000, 8001))
    assert first == again
    assert first != second
    assert with_address(ServeSettings(worker_id="mine")).worker_id == "mine"


def test_port_0_becomes_a_free_one() -> None:
    settings = with_address(ServeSettings(port=0))
    assert settings.port > 0
    assert str(settings.worker_id).endswith(f"-{settings.port}")


def test_an_unusable_host_is_named() -> None:
    with capture_logs() as logs:
        assert run_serve(ServeSettings(port=0, host="192.0.2.1")) == 78
    assert "cannot listen on 192.0.2.1" in logs[0]["reason"]


async def test_the_announcement_of_a_killed_worker_is_not_taken_for_its_successors(redis_client: Redis) -> None:
    registry = RedisWorkerRegistry(redis_client)
    announced = Announced(registry, "mine")
    await registry.announce(status("mine"), "")
    await registry.announce(status("other"), "")
    await announced.forget()
    assert not await announced.is_there()
    assert [w.worker_id for w in await registry.workers()] == ["other"]
    await registry.announce(status("mine"), "")
    assert await announced.is_there()


async def test_the_old_announcement_is_withdrawn_later_if_the_store_was_unreachable(redis_client: Redis) -> None:
    class Away(RedisWorkerRegistry):
        is_away = True

        async def withdraw(self, worker_id: str) -> None:
            if self.is_away:
                raise ConnectionError
            await super().withdraw(worker_id)

    registry = Away(redis_client)
    announced = Announced(registry, "mine")
    await registry.announce(status("mine"), "")
    await announced.forget()
    with pytest.raises(ConnectionError):
        await announced.is_there()
    registry.is_away = False
    assert not await announced.is_there()
    await registry.announce(status("mine"), "")
    assert await announced.is_there()


async def test_a_killed_part_does_not_count_as_a_follower_of_the_tiers(redis_client: Redis) -> None:
    tiers = TierStore(redis_client)
    settings = with_address(ServeSettings(port=8123, worker_id="mine"))
    for name in (worker_name("mine"), gateway_name(8123), worker_name("other")):
        await tiers.report(Follower(name))
    for part in (_worker(settings, redis_client), _gateway(settings, redis_client)):
        assert part.reloads
        assert part.before_start is not None
        await part.before_start()
    assert [f.part for f in await tiers.followers()] == ["worker other"]
