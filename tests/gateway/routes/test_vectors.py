"""/v1/embeddings and /v1/rerank: OpenAI's and Cohere's shapes, tiers, limits, usage, batches; models of other kinds."""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
from openai.types import CreateEmbeddingResponse
from tokenizers import processors

from engine.interface import FinishReason, ModelKind
from gateway.keys.usage import Use, total
from gateway.requests.answers.vectors import shortened
from gateway.requests.tokens.tokenizer import Tokenizer
from scheduler.client.rejection import Rejected, RejectReason
from scheduler.client.token_stream import TokenStream
from scheduler.request import PAIR_VERSION, USUAL_VERSION, Delivery, EventKind, Request, TokenEvent
from tests.encoders import CLS, CONTEXT, SEP, WORDS, pretrained
from tests.gateway.api_keys import as_
from tests.gateway.offline import jsonl, limited_keyring
from tests.gateway.protocol.test_errors import error_of
from tests.gateway.stand import Stand, make_tiers, running_stand
from tests.gateway.tiny_model import CONTEXT as OTHER_CONTEXT
from tests.gateway.tiny_model import MODEL

TOKENIZER = Tokenizer(pretrained(), CONTEXT)
A, B = WORDS.index("a"), WORDS.index("b")
MAX_LEN = OTHER_CONTEXT - 1  # the scripted worker's context, without the token that stands for the vector


def numbers_of(request: Request) -> tuple[float, ...]:
    """Return what the scripted worker computes: for a text its number of tokens, its second token and 1; for a pair
    the third number of its second text's first token."""
    ids = request.prompt_token_ids
    if request.second_from:
        return (1 / ids[request.second_from],)
    return (float(len(ids)), float(ids[1]), 1.0)


def computed(request: Request) -> list[TokenEvent]:
    numbers = numbers_of(request)
    vector = struct.pack(f"<{len(numbers)}f", *numbers)
    return [TokenEvent(request.id, EventKind.FINISHED, 0, (0,), FinishReason.LENGTH, vector=vector)]


def stand_of(kind: ModelKind, **options: Any) -> Any:
    return running_stand(options.pop("script", computed), kind=kind, tokenizer=TOKENIZER, **options)


@pytest.fixture
async def embedding() -> AsyncIterator[Stand]:
    async with stand_of("embedding") as stand:
        yield stand


@pytest.fixture
async def ranking() -> AsyncIterator[Stand]:
    async with stand_of("rerank") as stand:
        yield stand


async def embed(stand: Stand, given: Any, **more: Any) -> CreateEmbeddingResponse:
    """Ask as OpenAI's client does by default, for base64. Its strict mode takes no base64, not even OpenAI's."""
    http: Any = stand.http
    client = openai.AsyncOpenAI(http_client=http, base_url=f"{stand.url}/v1", api_key="sk-test", max_retries=0)
    return await client.embeddings.create(model=MODEL, input=given, **more)


# -- /v1/embeddings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [(CLS, A, B + 26, SEP)]),  # the second letter of a word has an id of its own
        (["a", "b b"], [(CLS, A, SEP), (CLS, B, B, SEP)]),
        ([A, B], [(A, B)]),
        ([[A, B], [B, A, A]], [(A, B), (B, A, A)]),
    ],
)
async def test_each_form_of_input_becomes_a_request_for_each_text(
    embedding: Stand, given: Any, tokens: list[tuple[int, ...]]
) -> None:
    answer = await embed(embedding, given)
    served = sorted(embedding.worker.served, key=lambda r: int(r.id.rpartition("-")[2]))
    assert [request.prompt_token_ids for request in served] == tokens
    assert {(r.delivery, r.second_from, r.version, r.tier) for r in served} == {
        (Delivery.AT_END, 0, USUAL_VERSION, "realtime")
    }
    assert [(one.index, one.object) for one in answer.data] == [(i, "embedding") for i in range(len(tokens))]
    assert [one.embedding for one in answer.data] == [list(numbers_of(request)) for request in served]
    total = sum(map(len, tokens))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)
    assert (answer.object, answer.model) == ("list", MODEL)
    assert (answer.model_extra or {})["service_tier"] == "default"


async def test_the_same_numbers_come_as_floats_and_as_base64(embedding: Stand) -> None:
    body = {"model": MODEL, "input": "a"}
    [as_floats] = (await embedding.post("/v1/embeddings", body)).json()["data"]
    [as_text] = (await embedding.post("/v1/embeddings", body | {"encoding_format": "base64"})).json()["data"]
    assert as_floats["embedding"] == [3.0, float(A), 1.0]
    assert struct.unpack("<3f", base64.b64decode(as_text["embedding"])) == (3.0, float(A), 1.0)


async def test_fewer_dimensions_are_the_first_ones_at_length_1(embedding: Stand) -> None:
    [one] = (await embed(embedding, "a", dimensions=2)).data
    length = (3.0**2 + A**2) ** 0.5
    assert one.embedding == pytest.approx([3.0 / length, A / length])
    with pytest.raises(openai.BadRequestError, match="have 3, not more") as caught:
        await embed(embedding, "a", dimensions=4)
    assert caught.value.param == "dimensions"


def test_a_vector_of_zeros_has_no_length_and_stays() -> None:
    assert shortened(bytes(12), 2) == bytes(8)


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": [A, len(WORDS) + 1000]}, "input", "invalid_value"),
        ({"input": {"text": "a"}}, "input", "invalid_type"),
        ({"input": None}, "input", "invalid_type"),
        ({"input": "a " * 300}, "input", "context_length_exceeded"),
        ({"input": ["a", "a " * 300]}, "input[1]", "context_length_exceeded"),
        ({"input": ["a", "a " * 3000]}, "input[1]", "context_length_exceeded"),  # refused by its characters
        ({"input": [A] * 300}, "input", "context_length_exceeded"),
        ({"input": ["a", "b"], "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": ["a"] * 65}, "input", "invalid_value"),  # the tier's queue holds 64
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"dimension": 3}, "dimension", "unknown_parameter"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"stream": True}, "stream", "invalid_value"),
        ({"model": "none"}, "model", "model_not_found"),
    ],
)
async def test_a_wrong_body_is_refused_by_name(
    embedding: Stand, changes: dict[str, Any], param: str, code: str
) -> None:
    answer = await embedding.post("/v1/embeddings", {"model": MODEL, "input": "a", **changes})
    error = error_of(answer, 404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code)
    assert not embedding.worker.served


async def test_a_text_without_tokens_is_empty() -> None:
    """A model without special tokens: a blank has no token, and no worker takes a prompt without any."""
    bare = pretrained()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing("$A", "$A $B:1", [])
    async with running_stand(computed, kind="embedding", tokenizer=Tokenizer(bare, CONTEXT)) as stand:
        error = error_of(await stand.post("/v1/embeddings", {"model": MODEL, "input": ["a b", " "]}), 400)
        assert (error["param"], error["code"], stand.worker.served) == ("input[1]", "invalid_value", [])


async def test_a_missing_input_is_named(embedding: Stand) -> None:
    error = error_of(await embedding.post("/v1/embeddings", {"model": MODEL}), 400)
    assert (error["param"], error["code"]) == ("input", "missing_required_parameter")


async def test_the_greatest_token_id_is_taken(embedding: Stand) -> None:
    refused = error_of(await embedding.post("/v1/embeddings", {"model": MODEL, "input": [2**30]}), 400)
    num_ids = int(refused["message"].rpartition("less than ")[2].rstrip("."))
    body = {"model": MODEL, "input": [num_ids]}
    assert error_of(await embedding.post("/v1/embeddings", body), 400)["message"] == refused["message"]
    assert (await embedding.post("/v1/embeddings", body | {"input": [A, num_ids - 1]})).status_code == 200


async def test_a_text_that_fits_is_not_cut(embedding: Stand) -> None:
    for keep in (3, 4, -1):
        await embed(embedding, "a", extra_body={"truncate_prompt_tokens": keep})
    assert {request.prompt_token_ids for request in embedding.worker.served} == {(CLS, A, SEP)}


@pytest.mark.parametrize(("keep", "num_tokens"), [(-1, MAX_LEN), (5, 5), (10_000, MAX_LEN)])
async def test_the_end_of_a_long_text_is_left_out_on_demand(embedding: Stand, keep: int, num_tokens: int) -> None:
    await embed(embedding, "b " * 300, extra_body={"truncate_prompt_tokens": keep})
    [request] = embedding.worker.served
    assert request.prompt_token_ids == (CLS, *[B] * (num_tokens - 2), SEP), "the special tokens stay"


# -- /v1/rerank --------------------------------------------------------------------------------------------------------


async def test_documents_are_sorted_by_relevance(ranking: Stand) -> None:
    body = {"model": MODEL, "query": "ab", "documents": ["z", {"text": "a"}, "b"]}
    answer = (await ranking.post("/v1/rerank", body)).json()
    assert [result["index"] for result in answer["results"]] == [1, 2, 0]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx([1 / A, 1 / B, 1 / 29])
    assert all(set(result) == {"index", "relevance_score"} for result in answer["results"])
    assert answer["usage"] == {"prompt_tokens": 18, "total_tokens": 18}
    assert answer["id"].startswith("rerank-") and answer["model"] == MODEL
    [first, *_] = sorted(ranking.worker.served, key=lambda r: r.id)
    assert first.prompt_token_ids == (CLS, A, B + 26, SEP, WORDS.index("z"), SEP)
    assert (first.second_from, first.version) == (4, PAIR_VERSION), "an older worker must not take it for one text"


async def test_the_best_documents_come_with_their_texts_on_demand(ranking: Stand) -> None:
    body = {"model": MODEL, "query": "q", "documents": ["z", "b"], "top_n": 1, "return_documents": True}
    [result] = (await ranking.post("/v1/rerank", body)).json()["results"]
    assert (result["index"], result["document"]) == (1, {"text": "b"})


async def test_the_query_of_a_long_document_stays_whole(ranking: Stand) -> None:
    body = {"model": MODEL, "query": "b", "documents": ["a " * 300], "truncate_prompt_tokens": 6}
    assert (await ranking.post("/v1/rerank", body)).status_code == 200
    [request] = ranking.worker.served
    assert request.prompt_token_ids == (CLS, B, SEP, A, A, SEP)
    for query, keep in (("b b b", 6), ("b " * 300, -1)):
        changes = {"query": query, "truncate_prompt_tokens": keep}
        error = error_of(await ranking.post("/v1/rerank", body | changes), 400)
        assert (error["param"], error["code"]) == ("truncate_prompt_tokens", "invalid_value")
        assert "'documents'" in error["message"]


async def test_an_empty_document_is_told_from_the_query(ranking: Stand) -> None:
    await ranking.post("/v1/rerank", {"model": MODEL, "query": "a", "documents": [""]})
    [request] = ranking.worker.served
    assert (request.prompt_token_ids, request.second_from) == ((CLS, A, SEP, SEP), 3)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": [{"title": "a"}]}, "documents[0].text"),
        ({"documents": [7]}, "documents[0]"),
        ({"documents": ["a", "a " * 300]}, "documents[1]"),
        ({"documents": ["a", "a " * 3000]}, "documents[1]"),
        ({"top_n": 0}, "top_n"),
    ],
)
async def test_a_wrong_ranking_is_refused_by_name(ranking: Stand, changes: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "query": "a", "documents": ["b"], **changes}
    assert error_of(await ranking.post("/v1/rerank", body), 400)["param"] == param


# -- kinds -------------------------------------------------------------------------------------------------------------

BODIES: dict[str, tuple[ModelKind, dict[str, Any]]] = {
    "/v1/chat/completions": ("chat", {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/completions": ("chat", {"prompt": "a"}),
    "/v1/responses": ("chat", {"input": "a"}),
    "/v1/embeddings": ("embedding", {"input": "a"}),
    "/v1/rerank": ("rerank", {"query": "a", "documents": ["b"]}),
}
USES = {"chat": "/v1/chat/completions", "embedding": "/v1/embeddings", "rerank": "/v1/rerank"}


@pytest.mark.parametrize("kind", USES)
async def test_an_endpoint_of_another_kind_names_the_way_out(kind: ModelKind) -> None:
    async with stand_of(kind) as stand:
        for path, (wanted, body) in BODIES.items():
            if wanted == kind:
                continue
            error = error_of(await stand.post(path, {"model": MODEL, **body}), 400)
            assert (error["type"], error["param"], error["code"]) == (
                "invalid_request_error",
                "model",
                "wrong_model_kind",
            ), path
            assert f"POST {USES[kind]}" in error["message"]
        assert not stand.worker.served
        capabilities = (await stand.http.get(f"/v1/models/{MODEL}")).json()["capabilities"]
        told = {name for name in ("completion", "embedding", "rerank") if capabilities[name]}
        assert told == {"completion" if kind == "chat" else kind}


async def test_the_context_is_that_of_texts(embedding: Stand) -> None:
    assert (await embedding.http.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == MAX_LEN


async def test_a_worker_for_chats_is_named_as_the_fault() -> None:
    def tokens(request: Request) -> list[TokenEvent]:
        return [TokenEvent(request.id, EventKind.FINISHED, 0, (7,), FinishReason.LENGTH)]

    async with stand_of("embedding", script=tokens) as stand:
        error = error_of(await stand.post("/v1/embeddings", {"model": MODEL, "input": "a"}), 500)
        assert "--engine embedding" in error["message"]


# -- as every other request --------------------------------------------------------------------------------------------


async def test_bulk_is_asked_for_and_answered_as_everywhere(embedding: Stand) -> None:
    answer = await embed(embedding, ["a", "b"], extra_body={"service_tier": "flex"})
    assert {request.tier for request in embedding.worker.served} == {"bulk"}
    assert (answer.model_extra or {})["service_tier"] == "flex"


async def test_texts_are_demoted_as_chats_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand_of("embedding", tiers=make_tiers(realtime={"admission": {"demote_to": "bulk"}})) as stand:
        submit = stand.gateway.client.submit

        async def refuse(requests: Sequence[Request]) -> TokenStream | Rejected:
            is_refused = requests[0].tier == "realtime"
            return Rejected(RejectReason.KEY_LIMIT, "Too many.", 1.0) if is_refused else await submit(requests)

        monkeypatch.setattr(stand.gateway.client, "submit", refuse)
        answer = await embed(stand, "a")
    assert (answer.model_extra or {})["service_tier"] == "flex"
    assert [request.tier for request in stand.worker.served] == ["bulk"]


async def test_keys_pay_for_the_tokens_of_texts_only() -> None:
    keys = limited_keyring(team={"tokens_per_minute": 6})
    async with stand_of("embedding", keyring=keys) as stand:
        headers = as_("team")
        body = {"model": MODEL, "input": ["a", "b"]}  # of 3 tokens each
        answer = await stand.post("/v1/embeddings", body, headers=headers)
        assert answer.headers["x-ratelimit-remaining-tokens"] == "0"
        refused = error_of(await stand.post("/v1/embeddings", body, headers=headers), 429)
        assert refused["code"] == "rate_limit_exceeded"
        await stand.gateway.usage.flush()
        [row] = total(await stand.gateway.usage.days(1))
        assert (row.key, row.tier, row.use) == ("team", "realtime", Use(1, 6))


async def test_a_single_text_may_be_kept_in_the_answer_cache(embedding: Stand) -> None:
    headers, body = {"X-Tidegate-Cache": "60"}, {"model": MODEL, "input": "a"}
    first, second, other = [
        await embedding.post("/v1/embeddings", body | {"input": text}, headers=headers) for text in ("a", "a", "b")
    ]
    assert [answer.headers["x-tidegate-cache"] for answer in (first, second, other)] == ["miss", "hit", "miss"]
    assert first.json()["data"] == second.json()["data"] != other.json()["data"]
    assert len(embedding.worker.served) == 2


async def batch_lines(stand: Stand, endpoint: Any, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a batch of these bodies. Return the lines of its output and of its errors, in the order of the input."""
    lines = [
        {"custom_id": str(i), "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
        for i, body in enumerate(bodies)
    ]
    file = await stand.client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = await stand.client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    async with asyncio.timeout(30):
        while batch.status not in ("completed", "failed"):
            batch = await stand.client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch.errors
    found = [
        json.loads(line)
        for file_id in (batch.output_file_id, batch.error_file_id)
        if file_id is not None
        for line in (await stand.client.files.content(file_id)).text.splitlines()
    ]
    return sorted(found, key=lambda line: int(line["custom_id"]))


async def test_lines_of_a_batch_are_embedded_in_its_tier(embedding: Stand) -> None:
    bodies = [{"input": "a"}, {"input": ["b", "a"], "encoding_format": "base64"}, {"input": "a " * 300}]
    first, second, third = await batch_lines(embedding, "/v1/embeddings", bodies)
    assert first["response"]["body"]["data"][0]["embedding"] == [3.0, float(A), 1.0]
    assert first["response"]["body"]["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    texts = [one["embedding"] for one in second["response"]["body"]["data"]]
    assert [struct.unpack("<3f", base64.b64decode(text))[1] for text in texts] == [B, A]
    assert third["response"]["status_code"] == 400
    assert third["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert {request.tier for request in embedding.worker.served} == {"batch"}


async def test_lines_of_a_batch_are_ranked(ranking: Stand) -> None:
    [line] = await batch_lines(ranking, "/v1/rerank", [{"query": "q", "documents": ["b", "a"]}])
    assert [result["index"] for result in line["response"]["body"]["results"]] == [1, 0]
