import asyncio
from pathlib import Path
from typing import Any

import pytest

from demo_model.location import demo_model_path
from engine.config import EngineStartError
from engine.interface import SamplingParams
from engine.streaming import StreamRequest
from engine.upstream.connect import UpstreamConfig, connect
from engine.upstream.http import Address, BadUrl
from tests.engine.upstream.scripted import Script, ScriptedServer, bound_socket, scripted_server


def config(server: ScriptedServer, **fields: Any) -> UpstreamConfig:
    return UpstreamConfig(server.url, str(demo_model_path()), **fields)


async def test_the_server_tells_its_kind_and_its_model() -> None:
    async with scripted_server() as server:
        upstream = await connect(config(server))
    assert (upstream.info.device, upstream.info.max_model_len) == ("vllm", 512)
    assert (upstream.info.vocab_size, upstream.info.eos_token_ids) == (1024, (4, 0))
    assert "bad_words" in upstream.unsupported and "top_k" not in upstream.unsupported


async def test_it_waits_for_a_server_that_comes_later() -> None:
    attempts, third, bound = 0, asyncio.Event(), bound_socket()

    async def sleep(seconds: float) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            third.set()
            await running.wait()

    running = asyncio.Event()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    connecting = asyncio.create_task(connect(UpstreamConfig(url, str(demo_model_path())), sleep))
    await third.wait()
    async with scripted_server(bound):
        running.set()
        assert (await connecting).info.device == "vllm"


async def test_a_server_that_still_loads_is_waited_for() -> None:
    async with scripted_server() as server:
        server.scripts.append(Script(status=503))

        async def sleep(seconds: float) -> None: ...

        assert (await connect(config(server), sleep)).info.device == "vllm"
    assert len(server.bodies) == 4, "the second for one token, the others for the prefix cache"


@pytest.mark.parametrize(("cached_block", "block_size"), [(0, 16), (1, 16), (16, 16), (128, 128)])
async def test_it_is_tried_whether_the_server_caches_prefixes(cached_block: int, block_size: int) -> None:
    """vLLM's blocks have 16 tokens on GPUs and 128 on CPUs; llama.cpp finds every token again."""
    async with scripted_server(cached_block=cached_block) as server:
        upstream = await connect(config(server))
        assert (upstream.caches_prefixes, upstream.info.block_size) == (cached_block > 0, block_size)


async def test_what_is_cached_is_read_behind_an_end_with_an_event_of_its_own() -> None:
    async with scripted_server(cached_block=16, ends_apart=True) as server:
        assert (await connect(config(server))).caches_prefixes


async def test_what_is_cached_is_read_in_llama_cpps_end() -> None:
    """The client knows the end by then, since it counts tokens."""
    async with scripted_server(owned_by="llamacpp", cached_block=1) as server:
        upstream = await connect(config(server))
        assert (upstream.info.device, upstream.caches_prefixes) == ("llama.cpp", True)


async def test_without_token_ids_the_server_gets_texts() -> None:
    async with scripted_server(returns_ids=False) as server:
        upstream = await connect(config(server))
        assert upstream.info.device == "plain"
        outputs = [o async for o in upstream.stream(StreamRequest("r", (300, 301), SamplingParams(4)))]
        assert isinstance(server.bodies[-1]["prompt"], str)
        assert outputs[-1].finish_reason is not None and all(o.token_ids for o in outputs)
        with pytest.raises(EngineStartError, match="--upstream-dialect plain"):
            await connect(config(server, dialect="vllm"))


async def test_a_server_without_priorities_gets_none() -> None:
    async with scripted_server(priorities=False) as server:
        upstream = await connect(config(server))
        [_ async for _ in upstream.stream(StreamRequest("r", (300,), SamplingParams(1), priority=100))]
    assert "priority" not in server.bodies[-1]


async def test_what_waiting_cannot_mend_ends_the_start() -> None:
    async with scripted_server(models=("a", "b")) as server:
        with pytest.raises(EngineStartError, match="a, b: say which one by --upstream-model"):
            await connect(config(server))
        assert (await connect(config(server, model="b"))).info.device == "vllm"
        server.scripts.append(Script(status=404, body="no such path"))
        with pytest.raises(EngineStartError, match=r"refuses a first request: .* 404: no such path\."):
            await connect(config(server, model="b"))
        server.key = "secret"
        with pytest.raises(EngineStartError, match="TIDEGATE_UPSTREAM_API_KEY"):
            await connect(config(server))
        assert (await connect(config(server, model="a", api_key="secret"))).info.device == "vllm"
    with pytest.raises(EngineStartError, match="expected http"):
        await connect(UpstreamConfig("localhost:8000", "model"))


async def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    async with scripted_server(owned_by="someone") as server:
        with pytest.raises(EngineStartError, match=r"no tokenizer\.json"):
            await connect(UpstreamConfig(server.url, str(tmp_path)))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:1/", "http://host:1"),
        ("http://host:1/v1", "http://host:1"),
        ("https://host/llm/v1/", "https://host:443/llm"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", "http://host:x", "http://host/?a=b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(BadUrl):
        Address.parse(url)
