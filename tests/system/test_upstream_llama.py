"""The whole server in front of a real llama.cpp on the CPU, with Gemma 3 270M behind the demo model's tokenizer.

The two vocabularies do not match, so texts mean nothing here; token ids do.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from demo_model.location import demo_model_path
from tests.system.llama import MARKS, llama_server
from tests.system.llama_server import SLOT_TOKENS
from tests.system.server import Server, make_client, running

pytestmark = MARKS
GEMMA_VOCAB = 262_144


@pytest.fixture(scope="module")
def llama_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_server(tmp_path_factory.mktemp("llama") / "model.gguf") as url:
        yield url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, llama_url: str) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("models") / "gemma"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_model_path() / name, model / name)
    config = json.loads((demo_model_path() / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": GEMMA_VOCAB}))
    flags = ("--engine", "openai", "--upstream", llama_url, "--model", str(model))
    with running(tmp_path_factory.mktemp("before-llama"), *flags) as started:
        started.wait_until_ready()
        yield started


async def ask(client: AsyncOpenAI, prompt: list[int], max_tokens: int = 20, **extra: Any) -> list[int]:
    """Return the tokens of one completion."""
    extra = {"return_token_ids": True, "ignore_eos": True, **extra}
    answer = await client.completions.create(
        model="gemma", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=extra
    )
    return list(answer.choices[0].model_extra["token_ids"]) if answer.choices[0].model_extra else []


async def test_the_server_is_known_by_its_own_words(server: Server) -> None:
    said = next(line for line in server.log_lines() if line["event"] == "the upstream answers")
    assert (said["dialect"], said["max_model_len"], said["caches_prefixes"]) == ("llama.cpp", SLOT_TOKENS, True)


async def test_chats_are_answered_beside_bulk(server: Server) -> None:
    async with make_client(server, timeout_s=300) as client:
        bulk = asyncio.create_task(ask(client, list(range(100, 140)), 40, service_tier="flex"))
        chats = await asyncio.gather(*(ask(client, [100 + i, 200, 300]) for i in range(3)))
        assert [len(chat) for chat in chats] == [20] * 3
        assert len(await bulk) == 40


async def test_penalties_reach_llama(server: Server) -> None:
    async with make_client(server, timeout_s=300) as client:
        plain = await ask(client, [300, 301, 302])
        assert await ask(client, [300, 301, 302], repetition_penalty=1.9, frequency_penalty=1.5) != plain
