"""Servers that embed and rank: what they are sent for one text or pair, and what comes of their answers."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineStartError
from engine.interface import SamplingParams, SequenceOutput
from engine.streaming import StreamRequest, Upstream, UpstreamBusy, UpstreamError, UpstreamLost, UpstreamRefused
from engine.upstream.connect import UpstreamConfig, connect
from tests.encoders import CLS, SEP, WORDS, pretrained
from tests.engine.upstream.scripted import MODEL, Script, ScriptedServer, scripted_server

A, B = WORDS.index("a"), WORDS.index("b")
ONE = SamplingParams(max_tokens=1)
TEXT = StreamRequest("r", (CLS, A, B, SEP), ONE)
PAIR = StreamRequest("r", (CLS, A, SEP, B, B, SEP), ONE, second_from=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of a model that a worker before a server reads: no weights."""
    directory = tmp_path_factory.mktemp("model")
    pretrained().save_pretrained(directory)
    config = {"vocab_size": len(WORDS), "max_position_embeddings": 512}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def config(server: ScriptedServer, model: Path, **fields: Any) -> UpstreamConfig:
    return UpstreamConfig(server.url, str(model), **{"kind": "embedding", **fields})


async def the_output(upstream: Upstream, request: StreamRequest) -> SequenceOutput:
    [output] = [output async for output in upstream.stream(request)]
    return output


async def test_a_text_is_sent_as_token_ids(model: Path) -> None:
    async with scripted_server() as server:
        upstream = await connect(config(server, model))
        output = await the_output(upstream, TEXT)
    assert server.bodies[-1] == {"model": MODEL, "input": [CLS, A, B, SEP]}
    assert struct.unpack("<2f", output.vector) == (0.5, 4.0)
    assert (len(output.token_ids), output.finish_reason is not None, output.num_computed_tokens) == (1, True, 4)
    assert upstream.info.max_model_len == 513, "with the token that stands for the vector"
    assert not upstream.unsupported


async def test_a_server_that_takes_no_ids_gets_the_text(model: Path) -> None:
    async with scripted_server(returns_ids=False) as server:
        upstream = await connect(config(server, model))
        await the_output(upstream, TEXT)
        assert server.bodies[-1] == {"model": MODEL, "input": "a b"}
        with pytest.raises(EngineStartError, match="refuses a first request"):
            await connect(config(server, model, dialect="vllm"))


async def test_a_pair_is_sent_as_a_query_and_one_document(model: Path) -> None:
    async with scripted_server() as server:
        upstream = await connect(config(server, model, kind="rerank"))
        output = await the_output(upstream, PAIR)
    trial, asked = server.bodies[0], server.bodies[-1]
    assert trial["documents"] == [trial["query"]] != [""]
    assert asked == {"model": MODEL, "query": "a", "documents": ["b b"]}
    assert struct.unpack("<f", output.vector) == pytest.approx((0.03,))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(status=400, body="too long"), UpstreamRefused),
        (Script(status=503), UpstreamBusy),
        (Script(status=500), UpstreamLost),
        (Script(body="{"), UpstreamLost),
        (Script(body='{"data": []}'), UpstreamLost),
        (Script(body='{"data": [{"embedding": [1]}, {"embedding": [2]}]}'), UpstreamLost),
        (Script(body='{"data": [{"embedding": []}]}'), UpstreamLost),
        (Script(body='{"data": [{"embedding": [0.5, 1e39]}]}'), UpstreamLost),  # beyond float32
    ],
)
async def test_an_answer_that_is_no_vector_is_an_error(model: Path, script: Script, error: type[UpstreamError]) -> None:
    async with scripted_server() as server:
        upstream = await connect(config(server, model))
        server.scripts.append(script)
        with pytest.raises(error):
            await the_output(upstream, TEXT)
        assert (await the_output(upstream, TEXT)).vector, "the next one is served"


async def test_a_server_without_the_endpoint_is_refused_at_the_start(model: Path) -> None:
    async with scripted_server() as server:
        server.scripts.append(Script(status=404, body="Not Found"))
        with pytest.raises(EngineStartError, match="404"):
            await connect(config(server, model))
