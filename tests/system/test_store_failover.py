"""A whole server behind a Sentinel, whose primary is replaced, dies and stalls while chats and batches run."""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import APIError, AsyncOpenAI
from redis.exceptions import ResponseError

from tests.scheduler.store.nodes import Pair, Sentinel, running_sentinel, server_pair
from tests.system.server import make_client, running
from tests.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

LINES = 10_000
LONGEST_S = 20.0  # of a request, and from a promotion to the next answer; usually two to five, but machines may be busy
CHAT = {"model": "tidegate-demo", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 8}
FAULTS = ("planned", "planned, while connections stall", "kill", "stop")


async def start_batch(client: AsyncOpenAI, lines: int) -> str:
    entry = {"method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "max_tokens": 2}}
    content = "\n".join(json.dumps({"custom_id": f"line-{i}", **entry}) for i in range(lines))
    file = await client.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return batch.id


@dataclass
class Clients:
    """Send chats, batches of one line and background responses, one after another of each kind."""

    client: AsyncOpenAI
    attempts: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # seconds, status
    last_s: dict[str, float] = field(default_factory=dict)  # begin of the last success
    batches: list[str] = field(default_factory=list)  # that were acknowledged
    responses: list[str] = field(default_factory=list)

    async def keep_sending(self, kind: str) -> None:
        send: Callable[[], Awaitable[None]] = getattr(self, kind)
        attempts = self.attempts.setdefault(kind, [])
        while True:
            begun, status = time.monotonic(), 200
            try:
                await send()
            except APIError as error:
                status = getattr(error, "status_code", 0)
            else:
                self.last_s[kind] = begun
            attempts.append((time.monotonic() - begun, status))
            await asyncio.sleep(0.05)

    async def chat(self) -> None:
        await self.client.chat.completions.create(**CHAT)  # type: ignore[call-overload]

    async def batch(self) -> None:
        self.batches.append(await start_batch(self.client, 1))

    async def response(self) -> None:
        answer = await self.client.responses.create(model="tidegate-demo", input="Count.", background=True)
        self.responses.append(answer.id)

    async def succeed(self, kind: str) -> float:
        """Wait until a request that begins from now on has succeeded. Return the time."""
        now = time.monotonic()
        await until(lambda: self.last_s.get(kind, 0.0) > now, 2 * LONGEST_S)
        return time.monotonic()


async def fail_over(pair: Pair, sentinel: Sentinel, fault: str) -> float:
    """Let the Sentinel promote the replica. Return the time of the promotion."""
    old, new = pair.primary, pair.replica
    await new.has_all_of(old)
    await until(sentinel.knows_replica)
    match fault:
        case "kill":
            old.send(signal.SIGKILL)
        case "stop":
            old.send(signal.SIGSTOP)
        case _:
            if "stall" in fault:
                assert old.proxy is not None
                old.proxy.stall()
            await until(lambda: accepts_failover(sentinel))
    await until(lambda: new.ask("ROLE")[0] == b"master")
    pair.primary, pair.replica = new, old
    return time.monotonic()


def accepts_failover(sentinel: Sentinel) -> bool:
    with suppress(ResponseError):  # the one before is not over yet
        sentinel.fail_over()
        return True
    return False


async def bring_back(pair: Pair, fault: str) -> None:
    """Let the old primary follow the new one."""
    if fault == "stop":
        pair.replica.send(signal.SIGCONT)
    elif fault == "kill":
        pair.replica.end()
        await pair.replica.start()
    await until(lambda: pair.replica.ask("ROLE")[:2] == [b"slave", b"127.0.0.1"])
    await until(lambda: pair.replica.ask("INFO", "replication")["master_link_status"] == "up")


async def output_of(client: AsyncOpenAI, batch_id: str) -> list[str]:
    """Wait for the end of a batch. Return the ids of its lines."""
    while (batch := await client.batches.retrieve(batch_id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        await asyncio.sleep(0.1)
    assert batch.output_file_id is not None
    output = (await client.files.content(batch.output_file_id)).text
    return sorted(json.loads(line)["custom_id"] for line in output.splitlines())


async def end_of(client: AsyncOpenAI, response_id: str) -> str | None:
    """Wait for the end of a background response. Return its status."""
    while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.1)
    return response.status


async def test_failovers_cost_seconds_of_503_and_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    async with AsyncExitStack() as site:
        pair = site.enter_context(server_pair(tmp_path))
        await site.enter_async_context(pair.behind_proxies())
        await pair.start()
        sentinel = await site.enter_async_context(running_sentinel(tmp_path, pair))
        server = site.enter_context(running(tmp_path / "data", "--redis-url", sentinel.url, "--store-replicas", "1"))
        await asyncio.to_thread(server.wait_until_ready)
        client = await site.enter_async_context(make_client(server))
        clients, large = Clients(client), await start_batch(client, LINES)
        sending = [asyncio.create_task(clients.keep_sending(kind)) for kind in ("chat", "batch", "response")]
        while (counts := (await client.batches.retrieve(large)).request_counts) is None or not counts.completed:
            await asyncio.sleep(0.01)
        for fault in FAULTS:
            await clients.succeed("chat")
            promoted_s = await fail_over(pair, sentinel, fault)
            away_s = await clients.succeed("chat") - promoted_s
            print(f"{fault}: chat after {away_s:.2f} s, {(await client.batches.retrieve(large)).request_counts}")
            assert away_s < LONGEST_S
            await bring_back(pair, fault)
            for kind in ("batch", "response"):
                await clients.succeed(kind)
        for task in sending:
            task.cancel()
        for kind, attempts in clients.attempts.items():
            statuses, longest_s = Counter(status for _, status in attempts), max(seconds for seconds, _ in attempts)
            print(f"{kind}: {dict(statuses)}, longest {longest_s:.2f} s")
            assert statuses.keys() <= {200, 503} and longest_s < LONGEST_S
        assert await output_of(client, large) == sorted(f"line-{i}" for i in range(LINES))
        for batch_id in clients.batches:
            assert await output_of(client, batch_id) == ["line-0"]
        for response_id in clients.responses:
            assert await end_of(client, response_id) in ("completed", "failed")
        await server.end()
        assert "Traceback" not in server.log.read_text()
