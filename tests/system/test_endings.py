"""How servers end: by draining, or at once."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from openai import APIError

from tests.system.server import make_client, running, wait_for
from tests.system.streams import ended_by_the_server, long_streams, stream_to_its_end

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

SLA_STREAM = "/admin/sla/stream"


async def test_sigterm_drains_and_exits_zero(tmp_path: Path) -> None:
    """Requests that end in time end normally. The others get an error, not a closed connection."""
    with running(tmp_path, "--drain-s", "8") as server:
        server.wait_until_ready()
        parts = [server.pid_of(part) for part in ("valkey", "worker", "gateway")]
        go_on = asyncio.Event()
        async with make_client(server) as client, long_streams(client, 8, go_on) as streams:
            short_started = asyncio.Semaphore(0)
            short = asyncio.create_task(stream_to_its_end(client, 20, short_started))
            await short_started.acquire()
            async with (
                httpx.AsyncClient(base_url=server.root, timeout=30) as watcher,
                watcher.stream("GET", SLA_STREAM) as feed,
            ):
                events = feed.aiter_lines()
                assert await anext(events) == "event: sla"
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(wait_for, lambda: not server.is_ready(), what="the drain")
                refused = await watcher.get("/v1/models")
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5"), "and not a closed port"
                assert await short == "length", "a running request is finished"
                os.kill(parts[1], signal.SIGSTOP)  # so that no other one can be
                assert "data" in {line.partition(":")[0] async for line in events}, "the live feed ends by itself"
            go_on.set()
            answers = await asyncio.gather(*streams)
            os.kill(parts[1], signal.SIGCONT)
        assert all(ended_by_the_server(answer) for answer in answers)
        errors = [answer for answer in answers if isinstance(answer, APIError)]
        assert errors, "some requests were left at the end of the drain"
        assert {error.code for error in errors} == {"server_overloaded"}, "the code of a 503, which clients retry"
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert not any(psutil.pid_exists(pid) for pid in parts)
        open_to_others = [path for path in tmp_path.rglob("*") if path != server.log and path.stat().st_mode & 0o077]
        assert not open_to_others
