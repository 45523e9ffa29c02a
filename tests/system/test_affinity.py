"""Three real workers: the turns of a chat go to the one that has its KV, and the chats to all of them."""

import asyncio
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.system.nonces import MODEL
from tests.system.server import Server, running, wait_for
from tests.system.test_rolling_restart import patient_tiers
from tidegate.valkey import running_valkey

WORKERS, CHATS, TURNS = 3, 18, 4
AT_ONCE = 6  # chats
BLOCK = 16  # tokens of a KV block
MIN_SHARE = 0.7  # of the tokens that one worker with the cache of all would find; without affinity, it is 0.54 to 0.58

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]


def words(rng: random.Random, count: int) -> str:
    return " ".join(3 * rng.choice("abcdefghij") for _ in range(count))


async def chat(client: httpx.AsyncClient, number: int) -> tuple[int, int, set[str]]:
    """Return the cached tokens of a chat's turns, how many they could have been, and which workers served it."""
    rng = random.Random(number)
    messages = [{"role": "user", "content": words(rng, 60)}]
    cached, most, known, workers = 0, 0, 0, set()
    for _ in range(TURNS):
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = (await client.post("/chat/completions", json=body)).raise_for_status().json()
        usage = answer["usage"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        most += known
        known = usage["prompt_tokens"] // BLOCK * BLOCK
        workers.add(answer["tidegate"]["worker"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": words(rng, 20)}]
    return cached, most, workers


async def play(base_url: str, numbers: range) -> list[tuple[int, int, set[str]]]:
    """Play these chats, `AT_ONCE` at the same time."""
    places, headers = asyncio.Semaphore(AT_ONCE), {"x-tidegate-receipt": "1"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=120) as client:

        async def play_one(number: int) -> tuple[int, int, set[str]]:
            async with places:
                return await chat(client, number)

        return await asyncio.gather(*map(play_one, numbers))


async def test_the_turns_of_a_chat_find_its_kv(tmp_path: Path) -> None:
    with running_valkey(tmp_path / "store") as store, ExitStack() as stack:
        flags = ("--redis-url", store, "--tiers", str(patient_tiers(tmp_path)))
        for number in range(WORKERS):
            stack.enter_context(running(tmp_path / f"w{number}", *flags, "--threads", "1", command="worker"))
        gateway = stack.enter_context(running(tmp_path / "gateway", *flags, command="gateway"))
        gateway.wait_until_ready()
        wait_for(lambda: len(gateway.workers()) == WORKERS, 90, "all workers")
        await play(gateway.base_url, range(CHATS))  # until they know how long their steps take
        await asyncio.to_thread(wait_for, lambda: predicts(gateway), 30, "heartbeats that say it")
        chats = await play(gateway.base_url, range(CHATS, 2 * CHATS))
    cached, most = sum(c for c, _, _ in chats), sum(m for _, m, _ in chats)
    print(f"\nof the last turns' full blocks, {cached / most:.0%} were found")  # for docs/benchmarks.md
    assert cached >= MIN_SHARE * most, chats
    served = Counter(worker for _, _, workers in chats for worker in workers)
    assert len(served) == WORKERS and max(served.values()) <= 0.9 * CHATS, served


def predicts(gateway: Server) -> bool:
    """Return whether the gateway can predict first tokens, which takes heartbeats of all workers with their rates."""
    return "realtime" in httpx.get(f"{gateway.root}/admin/sla", timeout=30).json()["predicted_ttft_s"]
