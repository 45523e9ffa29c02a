"""The whole server in front of a real vLLM on the CPU, with the demo model on both sides.

It takes a minute, and needs an environment with vLLM: `make test-vllm` makes one. Other runs skip it.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from demo_model.location import demo_model_path
from tests.system.server import Server, free_port, make_client, running, wait_for

START_S = 180.0
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"),
    pytest.mark.timeout(400),
]
FLAGS = ("--dtype", "bfloat16", "--max-model-len", "2048", "--scheduling-policy", "priority", "--enforce-eager")


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "log"
    url = f"http://127.0.0.1:{port}"
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(demo_model_path()),
        "--port",
        str(port),
        *FLAGS,
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, env=environment, start_new_session=True)

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            return httpx.get(f"{url}/v1/models").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(is_up, START_S, "vLLM")
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, vllm_url: str) -> Iterator[Server]:
    with running_before(vllm_url, tmp_path_factory.mktemp("before-vllm")) as started:
        yield started


@contextmanager
def running_before(vllm_url: str, data_dir: Path) -> Iterator[Server]:
    with running(data_dir, "--engine", "openai", "--upstream", vllm_url) as started:
        started.wait_until_ready()
        yield started


def num_running(vllm_url: str) -> float:
    lines = httpx.get(f"{vllm_url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running"))


async def answer(client: AsyncOpenAI, text: str, tier: str = "default", max_tokens: int = 40) -> str:
    reply = await client.chat.completions.create(
        model="tidegate-demo",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"service_tier": tier},
    )
    return reply.choices[0].message.content or ""


async def test_chats_are_answered_beside_bulk(server: Server) -> None:
    async with make_client(server) as client:
        texts = [f"Repeat: number {i} of a list" for i in range(12)]
        bulk = [asyncio.create_task(answer(client, text, "flex")) for text in texts]
        chats = await asyncio.gather(*(answer(client, text) for text in texts))
        assert await asyncio.gather(*bulk) == chats
        assert all(f"number {i}" in chat for i, chat in enumerate(chats))


async def test_options_reach_vllm(server: Server) -> None:
    async with make_client(server) as client:
        reply = await client.chat.completions.create(
            model="tidegate-demo",
            messages=[{"role": "user", "content": "Give me JSON"}],
            max_tokens=40,
            logprobs=True,
            top_logprobs=2,
            seed=7,
            extra_body={"top_k": 5, "min_p": 0.01, "structured_outputs": {"json": {"enum": ["x", "y"]}}},
        )
    choice = reply.choices[0]
    assert choice.message.content in ('"x"', '"y"')
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content[0].top_logprobs) == 2


async def test_a_killed_worker_leaves_nothing_running_at_vllm(tmp_path: Path, vllm_url: str) -> None:
    # A server of its own: it is killed, and where chats were answered lately, fewer streams of bulk may run.
    with running_before(vllm_url, tmp_path) as server:
        async with make_client(server) as client:
            extra = {"service_tier": "flex", "ignore_eos": True}
            asked = [
                client.completions.create(model="tidegate-demo", prompt="long", max_tokens=1500, extra_body=extra)
                for _ in range(4)
            ]
            tasks = [asyncio.create_task(request) for request in asked]
            await asyncio.to_thread(wait_for, lambda: num_running(vllm_url) == 4, 30, "four requests at vLLM")
            os.kill(server.process.pid, 9)  # the whole server: nobody asks again
            await asyncio.to_thread(wait_for, lambda: num_running(vllm_url) == 0, 5, "vLLM to be idle")
            await asyncio.gather(*tasks, return_exceptions=True)
