"""A change of tiers.yaml under a running server, by SIGHUP, while requests run and wait."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import AsyncOpenAI
from redis.asyncio import Redis

from tests.system.nonces import MODEL, ask
from tests.system.server import Server, running, wait_for
from tests.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]

ONE = {"min": 1, "start": 1, "max": 1}


def tiers(ttft_p99_ms: float = 500, batch_size: dict[str, int] = ONE, **more: dict[str, Any]) -> dict[str, Any]:
    return {
        "default_tier": "chat",
        "batch_tier": "bulk",
        "tiers": {
            "chat": {"priority": 9, "service_tiers": ["default"], "slo": {"ttft_p99_ms": ttft_p99_ms}},
            "bulk": {"priority": 1, "service_tiers": ["flex"], "batch_size": batch_size},
            **more,
        },
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiers") / "tiers.yaml"
    path.write_text(yaml.safe_dump(tiers()))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("serve"), "--tiers", str(file), "--threads", "1") as own:
        own.wait_until_ready()
        yield own


def in_force(server: Server) -> dict[str, Any]:
    answer = httpx.get(f"{server.root}/admin/tiers", timeout=10)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def post(server: Server, content: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.root}/admin/tiers", json=content, timeout=15)


async def num_entered(redis: Redis, tier: str) -> int:
    """Return how many requests are in the tier's queue or under lease."""
    return int(await redis.zcard(f"tidegate:queue:{tier}")) + int(await redis.zcard("tidegate:leases"))


async def test_sighup_changes_the_tiers_under_requests_that_run_and_wait(server: Server, file: Path) -> None:
    flex = {"service_tier": "flex", "ignore_eos": True}
    asking: Any = {"model": MODEL, "prompt": "Tide", "max_tokens": 600, "extra_body": flex}
    assert post(server, tiers()).status_code == 200
    async with AsyncOpenAI(base_url=server.base_url, api_key="test", max_retries=0, timeout=60) as client:
        worker = server.pid_of("worker")
        os.kill(worker, signal.SIGSTOP)  # so that none ends before all have come
        answers = [asyncio.create_task(client.completions.create(**asking)) for _ in range(5)]
        async with Redis.from_url(server.socket_url) as redis:

            async def all_entered() -> bool:
                return await num_entered(redis, "bulk") == len(answers)

            await until(all_entered)
            os.kill(worker, signal.SIGCONT)
            without_bulk = {**tiers(), "batch_tier": "chat", "tiers": {"chat": tiers()["tiers"]["chat"]}}
            refused = await asyncio.to_thread(post, server, without_bulk)
            assert refused.status_code == 409, refused.text
            assert "'bulk' cannot be removed" in refused.json()["error"]["message"]

        eco = {"priority": 5, "service_tiers": ["scale"]}
        file.write_text(yaml.safe_dump(tiers(ttft_p99_ms=750, batch_size={"min": 1, "start": 8, "max": 8}, eco=eco)))
        server.process.send_signal(signal.SIGHUP)

        def changed() -> bool:
            now = in_force(server)
            generations = {part["generation"] for part in now["parts"]}
            return "eco" in now["document"]["tiers"] and generations == {now["generation"]}

        await asyncio.to_thread(wait_for, changed)
        assert await ask(client, "k7Qz-09ab", service_tier="scale") == "k7Qz-09ab"
        done = await asyncio.gather(*answers)
        assert [answer.usage.completion_tokens for answer in done] == [600] * 5
    assert server.process.poll() is None

    def shown() -> bool:
        target = server.metric("tidegate_slo_target_seconds", tier="chat", metric="ttft")
        return target == 0.75 and server.metric("tidegate_prompt_tokens_total", tier="eco") > 0

    await asyncio.to_thread(wait_for, shown)
