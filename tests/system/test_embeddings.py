"""Models of all three kinds behind one door: `tidegate serve --models FILE`, and another `serve` in front of it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from demo_model.location import demo_model_path
from tests.encoders import CONTEXT, DIMENSIONS, save_encoder, save_reranker
from tests.system.server import START_TIMEOUT_S, Server, make_client, running, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

TEXTS = ["high tide", "low tide", "the tide rises and the tide falls", "bread"]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reranker(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, encoder: Path, reranker: Path) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    models = {
        "chat": {"path": str(demo_model_path())},
        "vectors": {"path": str(encoder), "kind": "embedding"},
        "ranker": {"path": str(reranker), "kind": "rerank"},
    }
    file = directory / "models.yaml"
    file.write_text(json.dumps({"models": models}), encoding="utf-8")
    with running(directory / "data", "--models", str(file)) as started:
        wait_for(lambda: started.is_ready() and all_serve(started), START_TIMEOUT_S, "all models serve")
        yield started


def all_serve(server: Server) -> bool:
    return all(httpx.get(f"{server.root}/ready", timeout=10).json()["models"].values())


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key="test", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def expected(encoder: Path) -> Any:
    """Return what sentence-transformers makes of `TEXTS`."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(encoder), device="cpu").encode(TEXTS)


def rerank(root: str, model: str = "ranker", documents: list[str] = TEXTS) -> dict[int, float]:
    body = {"model": model, "query": "tide", "documents": documents}
    answer = httpx.post(f"{root}/v1/rerank", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return {result["index"]: result["relevance_score"] for result in answer.json()["results"]}


def test_openais_client_gets_the_embeddings_of_the_model(client: OpenAI, expected: Any) -> None:
    answer = client.embeddings.create(model="vectors", input=TEXTS)
    assert np.abs(np.array([one.embedding for one in answer.data]) - expected).max() < CLOSE
    alone = client.embeddings.create(model="vectors", input=TEXTS[2], encoding_format="float", dimensions=DIMENSIONS)
    unit = expected[2] / np.linalg.norm(expected[2])
    assert np.abs(np.array(alone.data[0].embedding) - unit).max() < CLOSE


def test_documents_are_ranked_as_sentence_transformers_ranks_them(server: Server, reranker: Path) -> None:
    from sentence_transformers import CrossEncoder

    scores = CrossEncoder(str(reranker), device="cpu").predict([("tide", text) for text in TEXTS])
    found = rerank(server.root)
    assert list(found) == sorted(found, key=lambda index: -found[index])
    assert np.abs(np.array([found[i] for i in range(len(TEXTS))]) - scores).max() < CLOSE


def test_each_kind_refuses_the_others_endpoints(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="POST /v1/embeddings") as caught:
        client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "hi"}])
    assert (caught.value.code, caught.value.param) == ("wrong_model_kind", "model")
    with pytest.raises(openai.BadRequestError, match="POST /v1/chat/completions"):
        client.embeddings.create(model="chat", input="hi")
    with pytest.raises(openai.BadRequestError, match="POST /v1/rerank"):
        client.embeddings.create(model="ranker", input="hi")
    assert client.completions.create(model="chat", prompt="hi", max_tokens=2).choices


def test_a_batch_ingests_texts(client: OpenAI, server: Server, expected: Any) -> None:
    line = {"method": "POST", "url": "/v1/embeddings"}
    bodies = [{"model": "vectors", "input": text, "encoding_format": "float"} for text in TEXTS * 25]
    lines = [json.dumps({**line, "custom_id": str(i), "body": body}) for i, body in enumerate(bodies)]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", 60, "the batch is completed")
    output_id = client.batches.retrieve(batch.id).output_file_id
    assert output_id is not None
    answers = [json.loads(answer) for answer in client.files.content(output_id).text.splitlines()]
    assert len(answers) == len(bodies)
    for answer in answers:
        found = np.array(answer["response"]["body"]["data"][0]["embedding"])
        assert np.abs(found - expected[int(answer["custom_id"]) % len(TEXTS)]).max() < CLOSE
    assert server.metric("tidegate_requests_finished_total", tier="batch", model="vectors") >= len(bodies)


async def test_a_querys_embedding_goes_before_the_rest_of_an_ingestion(server: Server) -> None:
    async with make_client(server) as client:
        long = "tide " * ((CONTEXT - 2) // 4)
        parts = [
            asyncio.create_task(
                client.embeddings.create(model="vectors", input=[long] * 512, extra_body={"service_tier": "flex"})
            )
            for _ in range(4)
        ]
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        await client.embeddings.create(model="vectors", input="tide")
        assert not all(part.done() for part in parts)
        assert [len((await part).data) for part in parts] == [512] * 4


def test_another_tidegate_passes_on_what_this_one_computes(
    server: Server, tmp_path: Path, encoder: Path, reranker: Path, expected: Any
) -> None:
    flags = ("--engine", "openai", "--upstream", server.base_url)
    with running(tmp_path / "embed", *flags, "--upstream-model", "vectors", "--model", str(encoder)) as front:
        front.wait_until_ready()
        client = OpenAI(base_url=front.base_url, api_key="test", max_retries=0)
        found = [one.embedding for one in client.embeddings.create(model="encoder", input=TEXTS).data]
        assert np.abs(np.array(found) - expected).max() < CLOSE
    with running(tmp_path / "rank", *flags, "--upstream-model", "ranker", "--model", str(reranker)) as front:
        front.wait_until_ready()
        passed, own = rerank(front.root, reranker.name), rerank(server.root)
        assert list(passed) == list(own) and list(passed.values()) == pytest.approx(list(own.values()), abs=CLOSE)
