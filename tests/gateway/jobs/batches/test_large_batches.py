"""Batches of many lines: how many there may be, and what a restart holds in memory."""

import asyncio
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from gateway.protocol.json_body import INLINE_SIZE, MAX_BODIES
from tests.gateway.offline import ScriptedCompletions, lines, running_gateway
from tests.gateway.stand import Bytes
from tests.waiting import until


async def test_large_lines_run_as_memory_permits_and_hold_up_no_small_ones(redis_client: Redis, tmp_path: Path) -> None:
    completions = ScriptedCompletions()
    completions.permits = asyncio.Semaphore(0)
    options: Any = {"completions": completions, "max_body_mb": Bytes(INLINE_SIZE + 10_000)}
    async with running_gateway(redis_client, tmp_path, **options) as gateway:
        large = [entry | {"body": entry["body"] | {"user": "x" * INLINE_SIZE}} for entry in lines(MAX_BODIES + 8)]
        first = await gateway.submit(large)
        await until(lambda: completions.running == MAX_BODIES)
        second = await gateway.submit(lines(40))
        await until(lambda: completions.running == MAX_BODIES + 40)
        for _ in range(len(large) + 40):
            completions.permits.release()
        assert [(await gateway.ended(batch.id)).status for batch in (first, second)] == ["completed"] * 2
    assert completions.peak == MAX_BODIES + 40
