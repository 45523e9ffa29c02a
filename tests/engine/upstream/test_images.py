"""Chats with images: they go to the server's chat endpoint as they came, and the server counts them."""

import json
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from demo_model.location import demo_model_path
from engine.interface import EngineInfo, FinishReason, SamplingParams, SequenceOutput
from engine.streaming import StreamRequest, UpstreamLost
from engine.upstream.bodies import chat_body_of
from engine.upstream.client import HttpUpstream
from engine.upstream.connect import UpstreamConfig, connect
from engine.upstream.dialects import CHAT_DIALECTS, CHAT_PATH, Dialect, recognise
from engine.upstream.status import ModelCard
from engine.upstream.texts import Texts
from tests.engine.upstream.scripted import (
    MODEL,
    UNLIMITED,
    VOCAB,
    Script,
    ScriptedServer,
    scripted_server,
    tokens_after,
)

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}]}
INFO = EngineInfo("model", 512, VOCAB, 16, 1024, 2048)
CARD = ModelCard(MODEL)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def chat(max_tokens: int = 50, said: Any = CHAT, **sampling: Any) -> StreamRequest:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
    return StreamRequest("r", (1,) * 30, params, cache_salt="salt", priority=100, chat=json.dumps(said))


async def connected(server: ScriptedServer, **config: Any) -> HttpUpstream:
    upstream = await connect(UpstreamConfig(server.url, str(demo_model_path()), **{"takes_images": True, **config}))
    server.bodies.clear()
    server.paths.clear()
    return upstream


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))


async def outputs_of(upstream: HttpUpstream, request: StreamRequest) -> list[SequenceOutput]:
    return [output async for output in upstream.stream(request)]


@pytest.mark.parametrize("dialect", CHAT_DIALECTS.values(), ids=lambda d: d.name)
@given(messages=JSON, arguments=JSON)
def test_the_server_gets_what_the_client_sent(dialect: Dialect, messages: Any, arguments: Any) -> None:
    said = {"messages": messages, "chat_template_kwargs": arguments, "max_tokens": 7}
    sent = json.loads(msgspec.json.encode(chat_body_of(chat(said=said), dialect, "m")))
    assert {name: sent[name] for name in said} == said
    assert sent["model"] == "m" and sent["stream"] is True


@pytest.mark.parametrize(
    ("owner", "fields"),
    [
        ("vllm", {"cache_salt": "salt", "priority": -100, "return_token_ids": True, "seed": 7}),
        ("sglang", {"extra_key": "salt", "priority": 100, "separate_reasoning": False}),
        ("llamacpp", {"cache_prompt": False, "reasoning_format": "none", "repeat_last_n": 80}),
        ("someone", {}),
    ],
)
async def test_it_comes_by_the_chat_endpoint_and_the_server_counts_it(owner: str, fields: dict[str, Any]) -> None:
    prompt = [len(json.dumps(CHAT["messages"]))]
    async with scripted_server(owned_by=owner) as server:
        texts = Texts(tokenizer())
        upstream = HttpUpstream(server.sender, dialect := recognise(owner), CARD, INFO, texts)
        upstream.take_images(texts)
        outputs = await outputs_of(upstream, chat(seed=7))
    [body] = server.bodies
    assert server.paths == [CHAT_PATH]
    assert body.items() >= {**fields, **CHAT, "stream_options": {"include_usage": True}}.items()
    assert "max_tokens" not in body, "only the server knows how much room there is"
    ids = [token_id for output in outputs for token_id in output.token_ids]
    answer = tokens_after(prompt, UNLIMITED)
    if dialect.name == "vllm":
        assert ids == answer
    else:
        assert tokenizer().decode(ids) == "".join(f" w{token_id}" for token_id in answer)
    assert [o.finish_reason for o in outputs] == [None] * (UNLIMITED - 1) + [FinishReason.LENGTH]
    assert [o.num_prompt_tokens for o in outputs] == [0] * (UNLIMITED - 1) + [len(json.dumps(CHAT["messages"]))]


async def test_a_limit_of_the_clients_is_sent_and_the_estimate_is_one_too() -> None:
    async with scripted_server() as server:
        upstream = await connected(server)
        limited = await outputs_of(upstream, chat(3, {**CHAT, "max_tokens": 3}))
        cut = await outputs_of(upstream, chat(4))
    assert [body.get("max_tokens") for body in server.bodies] == [3, None]
    assert (len(limited), len(cut)) == (3, 4) and cut[-1].finish_reason is FinishReason.LENGTH


async def test_chats_without_images_go_the_usual_way() -> None:
    async with scripted_server() as server:
        upstream = await connected(server)
        await outputs_of(upstream, StreamRequest("r", (5, 6), SamplingParams(2, temperature=0.0)))
    assert server.paths == ["/v1/completions"] and server.bodies[0]["prompt"] == [5, 6]


async def test_a_broken_stream_of_a_chat_is_lost_and_hung_up() -> None:
    async with scripted_server() as server:
        upstream = await connected(server)
        server.scripts.append(Script(after=2, then="cut"))
        with pytest.raises(UpstreamLost):
            await outputs_of(upstream, chat())
        server.scripts.append(Script(after=1, then="hang"))
        async with aclosing(upstream.stream(chat())) as outputs:
            await anext(outputs)
        await server.wait_until("num_open", 0)
        assert server.num_hung_up == 1


async def test_what_does_not_go_with_images_is_named() -> None:
    async with scripted_server() as server:
        vllm, without = await connected(server), await connected(server, takes_images=False)
        plain = await connected(server, dialect="plain")
    assert (vllm.info.takes_images, without.info.takes_images) == (True, False)
    assert vllm.unsupported - without.unsupported == {"images+logprobs"}
    assert {"images+tools"} == {name for name in plain.unsupported if name.startswith("images+")}
