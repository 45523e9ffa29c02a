"""Real processes that come and go as GET /admin/scale says: from no worker to one, and back."""

import asyncio
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from scheduler.config import shipped_tiers_path
from tests.system.nonces import ask, make_nonce
from tests.system.server import Server, make_client, running, wait_for
from tests.system.streams import long_streams
from tidegate.valkey import running_valkey

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]


@contextmanager
def gateway_without_workers(tmp_path: Path) -> Iterator[tuple[Server, tuple[str, str]]]:
    tiers = tmp_path / "tiers.yaml"
    shipped = shipped_tiers_path().read_text()
    for short, long in (("patience_ms: 10000", "patience_ms: 180000"), ("timeout_ms: 60000", "timeout_ms: 180000")):
        assert short in shipped
        shipped = shipped.replace(short, long)
    tiers.write_text(shipped)
    with running_valkey(tmp_path / "store") as url:
        flags = ("--redis-url", url, "--tiers", str(tiers))
        with running(tmp_path / "gateway", *flags, "--scale-from-zero", command="gateway") as gateway:
            gateway.wait_until_ready()
            yield gateway, ("--redis-url", url)


def wanted(gateway: Server) -> int:
    answer = httpx.get(f"{gateway.root}/admin/scale", timeout=10)
    assert answer.status_code == 200, answer.text
    number = answer.json()["workers_wanted"]
    assert isinstance(number, int)
    return number


async def until_wanted(gateway: Server, number: int) -> None:
    await asyncio.to_thread(wait_for, lambda: wanted(gateway) == number, 90, f"{number} workers to be wanted")


@pytest.mark.parametrize("service_tier", ["default", "flex"])
async def test_the_first_request_waits_for_the_worker_that_it_makes_wanted(tmp_path: Path, service_tier: str) -> None:
    with gateway_without_workers(tmp_path) as (gateway, store):
        assert wanted(gateway) == 0
        async with make_client(gateway) as client:
            nonce = make_nonce(random.Random(1))
            asked = asyncio.create_task(ask(client, nonce, service_tier=service_tier))
            await until_wanted(gateway, 1)
            with running(tmp_path / "w", *store, command="worker"):
                assert await asked == nonce


async def test_a_worker_that_is_stopped_ends_what_it_has_begun_and_the_next_one_serves_the_rest(tmp_path: Path) -> None:
    with gateway_without_workers(tmp_path) as (gateway, store):
        async with make_client(gateway) as client:
            with running(tmp_path / "w", *store, command="worker") as worker:
                await asyncio.to_thread(wait_for, lambda: len(gateway.workers()) == 1, 90, "the first worker")
                async with long_streams(client, 2) as streams:
                    worker.process.send_signal(signal.SIGTERM)
                    await asyncio.to_thread(wait_for, lambda: not gateway.workers(), what="the worker to drain")
                    assert gateway.is_ready()
                    late = make_nonce(random.Random(2))
                    asked = asyncio.create_task(ask(client, late))
                    with running(tmp_path / "next", *store, command="worker"):
                        assert await asked == late
                    assert await asyncio.gather(*streams) == ["length", "length"]
                assert await asyncio.to_thread(worker.process.wait, 60) == 0
            await asyncio.to_thread(wait_for, lambda: not gateway.workers(), what="the end of the last worker")
            assert gateway.is_ready()
