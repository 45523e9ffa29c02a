"""The real server process, over HTTP, with the official client."""

import asyncio
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI
from redis.asyncio import Redis

from tests.system.nonces import MODEL, ask, ask_streamed, make_nonce
from tests.system.server import Server, make_client, run_to_end, running, wait_for
from tests.system.streams import ended_by_the_server, long_streams

TIERS = ("realtime", "bulk", "batch")
README = Path(__file__).parents[2] / "README.md"
GUIDE = README.parent / "docs" / "getting-started.md"
DEFAULT_URL = "http://127.0.0.1:8000/v1"


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def test_plain_and_streamed_chat_answer_the_question(client: AsyncOpenAI) -> None:
    assert await ask(client, "k7Qz-09ab") == "k7Qz-09ab"
    assert await ask_streamed(client, "Zx81-4hTq") == "Zx81-4hTq"


async def test_the_demo_model_knows_what_tidegate_is(client: AsyncOpenAI) -> None:
    question = {"role": "user", "content": "What is Tidegate?"}
    answer = await client.chat.completions.create(model=MODEL, messages=[question], temperature=0)
    assert "gateway" in (answer.choices[0].message.content or "").lower()
    assert answer.choices[0].finish_reason == "stop"


async def test_a_common_prompt_prefix_is_computed_once_for_each_cache_salt(client: AsyncOpenAI) -> None:
    prompt = [5 + i % 90 for i in range(100)]

    async def cached_tokens(salt: str, *, stream: bool = False) -> int:
        options: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "extra_body": {"cache_salt": salt}}
        if stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
            usage = [chunk.usage async for chunk in await client.completions.create(**options)][-1]
        else:
            usage = (await client.completions.create(**options)).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [await cached_tokens("ours") for _ in range(2)] == [0, 96]
    assert await cached_tokens("ours", stream=True) == 96
    assert await cached_tokens("theirs") == 0


async def test_64_concurrent_nonces_over_both_tiers_each_get_their_own(server: Server, client: AsyncOpenAI) -> None:
    """Each of them goes through its tier's sorted set, and none stays there."""
    rng = random.Random(20261121)
    nonces = [make_nonce(rng) for _ in range(64)]
    async with Redis.from_url(server.socket_url) as redis:

        async def num_zadd() -> int:
            stats = await redis.info("commandstats")
            return int(stats.get("cmdstat_zadd", {"calls": 0})["calls"])

        before = await num_zadd()
        asks = [
            (ask_streamed if i % 2 else ask)(client, nonce, service_tier="flex" if i % 4 < 2 else "default")
            for i, nonce in enumerate(nonces)
        ]
        assert await asyncio.gather(*asks) == nonces
        assert await num_zadd() - before >= len(nonces)
        assert [await redis.zcard(f"tidegate:queue:{tier}") for tier in TIERS] == [0, 0, 0]


async def test_a_client_that_disconnects_frees_its_place(server: Server, client: AsyncOpenAI) -> None:
    def cancelled() -> float:
        return server.metric("tidegate_requests_finished_total", tier="realtime", reason="cancelled")

    before = await asyncio.to_thread(cancelled)
    stream = await client.completions.create(
        model=MODEL, prompt="Tidegate", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    await eventually(lambda: cancelled() > before)
    await eventually(lambda: server.metric("tidegate_num_requests_running") == 0)


async def test_metrics_of_worker_and_gateway_are_in_one_page(server: Server, client: AsyncOpenAI) -> None:
    await ask(client, "abcd-1234")
    await eventually(lambda: server.metric("tidegate_time_to_first_token_seconds_count", tier="realtime") > 0)
    await eventually(lambda: server.metric("tidegate_http_requests_total", route="/v1/chat/completions") > 0)
    assert server.metric("tidegate_slo_target_seconds", tier="realtime", metric="ttft") == 0.5
    assert server.metric("tidegate_controller_batch_size", tier="bulk") > 0


def snippets(page: Path) -> list[str]:
    """Return the blocks of Python on a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "number", "lines"),
    [
        (README, 0, ["default k7Qz-09ab", "flex k7Qz-09ab"]),
        (GUIDE, 0, ["tide and gate"]),
        (GUIDE, 1, ["item 63"]),
    ],
)
async def test_the_python_for_newcomers_does_what_it_says(
    server: Server, page: Path, number: int, lines: list[str]
) -> None:
    await asyncio.to_thread(server.wait_until_ready)
    program = snippets(page)[number]
    assert DEFAULT_URL in program
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program.replace(DEFAULT_URL, server.base_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    assert printed.decode().splitlines() == lines


@pytest.mark.parametrize(("page", "count"), [(README, 1), (GUIDE, 2)])
def test_no_python_for_newcomers_is_left_out(page: Path, count: int) -> None:
    assert len(snippets(page)) == count


@pytest.mark.full
def test_a_gateway_with_files_of_its_own_is_refused(server: Server, tmp_path: Path) -> None:
    """Its sweep would take the other gateways' files for leftovers, and theirs its own."""
    ended = run_to_end("gateway", "--redis-url", server.socket_url, "--port", "0", "--data-dir", str(tmp_path))
    assert ended.returncode == 78
    assert "tidegate adopt" in ended.stderr and str(tmp_path) in ended.stderr


@pytest.mark.full
@pytest.mark.timeout(180)
async def test_parts_run_alone_on_an_existing_store(server: Server, tmp_path: Path) -> None:
    """`tidegate gateway` and `tidegate worker` on the Valkey of a running server, which they do not disturb."""
    store = ("--redis-url", server.socket_url)
    files = ("--files-url", f"file://{server.data_dir}")
    with (
        running(tmp_path / "second", *store, *files, "--drain-s", "90", command="gateway") as gateway,
        running(tmp_path / "w", *store, command="worker") as worker,
    ):
        gateway.wait_until_ready()
        workers_url = f"{gateway.root}/ready"
        wait_for(lambda: len(httpx.get(workers_url, timeout=30).json()["workers"]) == 2, 60, "the second worker")
        async with make_client(gateway) as client:
            nonces = [make_nonce(random.Random(i)) for i in range(24)]
            assert await asyncio.gather(*(ask(client, n, service_tier="flex") for n in nonces)) == nonces
            go_on = asyncio.Event()
            async with long_streams(client, 16, go_on) as streams:
                gateway.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(wait_for, lambda: not gateway.is_ready(), what="the gateway to drain")
                gateway.process.send_signal(signal.SIGTERM)  # at once, not after 90 s
                assert await asyncio.to_thread(gateway.process.wait, 40) == 0
                go_on.set()
                answers = await asyncio.gather(*streams)
        assert all(ended_by_the_server(answer) for answer in answers)
        assert any(isinstance(answer, APIError) for answer in answers), "no request was cut short"
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.process.wait, 60) == 0
    await eventually(lambda: server.is_ready() and len(server.workers()) == 1)
