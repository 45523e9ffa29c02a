"""The whole server on vLLM's executor with the demo model: right answers, also after a death of the executor.

`make test-vllm` runs this in vLLM's environment.
"""

import asyncio
import random
from collections.abc import Iterator

import psutil
import pytest

from tests.engine.contract.engines import NEEDS_VLLM, VLLM_PROCESSES
from tests.system.nonces import ask, ask_streamed, make_nonce
from tests.system.server import Server, make_client, running, wait_for
from tests.system.test_deaths import batch_answers, expected, submit_batch

pytestmark = [pytest.mark.full, NEEDS_VLLM, pytest.mark.timeout(600)]  # two starts

START_TIMEOUT_S = 240.0  # vLLM's imports take most of it on a busy machine
FLAGS = f"--enforce-eager --gpu-memory-utilization 0.2 --tensor-parallel-size {VLLM_PROCESSES}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--engine", "vllm", "--dtype", "float32", f"--vllm-args={FLAGS}", "--kv-cache-mb", "64")
    with running(tmp_path_factory.mktemp("vllm"), *flags) as on_vllm:
        on_vllm.wait_until_ready(START_TIMEOUT_S)
        yield on_vllm


def nonces(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [make_nonce(rng) for _ in range(count)]


async def test_plain_and_streamed_chats_in_both_tiers(server: Server) -> None:
    async with make_client(server) as client:
        sent = nonces(24, seed=1)
        tiers = ["default", "flex"] * 12
        asks = [ask if i % 3 else ask_streamed for i in range(24)]
        answers = [a(client, nonce, service_tier=tier) for a, nonce, tier in zip(asks, sent, tiers, strict=True)]
        assert await asyncio.gather(*answers) == sent


async def test_seeds_and_log_probabilities_repeat(server: Server) -> None:
    async with make_client(server) as client:
        options = {"temperature": 1.2, "seed": 5, "logprobs": True, "top_logprobs": 2, "max_tokens": 12}

        async def sample() -> tuple[str, list[str]]:
            messages = [{"role": "user", "content": "What is Tidegate?"}]
            answer = await client.chat.completions.create(model="tidegate-demo", messages=messages, **options)  # type: ignore[call-overload]
            (choice,) = answer.choices
            return choice.message.content, [entry.token for entry in choice.logprobs.content]

        first, second = await asyncio.gather(sample(), sample())
        assert first == second and len(first[1]) > 3


async def test_chats_are_right_beside_a_batch(server: Server) -> None:
    async with make_client(server) as client:
        lines, chats = nonces(60, seed=2), nonces(12, seed=3)
        batch_id = await submit_batch(client, lines)
        for nonce in chats:
            assert await ask(client, nonce) == nonce
        assert await batch_answers(client, batch_id) == expected(lines)


async def test_a_dead_executor_loses_nothing(server: Server) -> None:
    """The worker ends with its executor, starts again, and finishes the bulk requests that were under way."""
    async with make_client(server, timeout_s=START_TIMEOUT_S) as client:
        sent, before = nonces(40, seed=4), server.pid_of("worker")
        executor = executor_of(before)
        async with asyncio.timeout(60):
            while True:
                answers = [asyncio.create_task(ask(client, nonce, service_tier="flex")) for nonce in sent]
                await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
                executor.suspend()  # so that no further step ends
                if not all(task.done() for task in answers):
                    break
                executor.resume()
        # The worker may have what is left of those answers already. Only the next worker can answer this one.
        late = make_nonce(random.Random(5))
        answers.append(asyncio.create_task(ask(client, late, service_tier="flex")))
        executor.kill()
        await asyncio.to_thread(wait_for, lambda: server.pid_of("worker") != before, 60, "a new worker")
        assert await asyncio.gather(*answers) == [*sent, late]
        assert await ask_when_ready(server, sent[0]) == sent[0]


async def ask_when_ready(server: Server, nonce: str) -> str:
    await asyncio.to_thread(wait_for, server.is_ready, START_TIMEOUT_S, "the server to be ready again")
    async with make_client(server) as client:
        return await ask(client, nonce)


def executor_of(worker: int) -> psutil.Process:
    """Return a process of vLLM's executor: the child of the worker with the most memory, since it holds the model."""
    children = psutil.Process(worker).children(recursive=True)
    return max(children, key=lambda child: child.memory_info().rss)
