"""The official client with an embedding model and a reranker: by default, it asks for vectors in base64."""

import json
import math
import time
from urllib.request import urlopen

from checks import API_KEY, BASE_URL, check, main
from openai import BadRequestError, OpenAI

client = OpenAI(base_url=BASE_URL, api_key=API_KEY)
TEXTS = ["w1 w2 w3", "w4"]
IDS = [[1, 2, 3], [4]]


def embedded(given: object, **options: object) -> list[list[float]]:
    answer = client.embeddings.create(model="vectors", input=given, **options)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return [one.embedding for one in answer.data]


def are_close(some: list[list[float]], others: list[list[float]]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(math.dist(one, other) < 1e-4 for one, other in pairs)  # other batches round otherwise


@check
def base64() -> None:
    """embeddings in base64 and as numbers are the same, and two texts have different ones"""
    found = embedded(TEXTS)
    assert are_close(found, embedded(TEXTS, encoding_format="float"))
    assert len(found[0]) == len(found[1]) and not are_close(found[:1], found[1:])


@check
def strict() -> None:
    """an answer with numbers passes the client's strict validation, and has usage"""
    own = OpenAI(base_url=BASE_URL, api_key=API_KEY, _strict_response_validation=True)
    answer = own.embeddings.create(model="vectors", input=TEXTS, encoding_format="float")
    assert answer.object == "list" and answer.usage.prompt_tokens == answer.usage.total_tokens == 4


@check
def token_ids() -> None:
    """token ids have the embeddings of their texts"""
    assert are_close(embedded(TEXTS), embedded(IDS))
    assert are_close(embedded(TEXTS[0]), embedded(IDS[0]))


@check
def dimensions() -> None:
    """with dimensions, embeddings are shorter and have the length 1"""
    [vector] = embedded("w1", dimensions=8)
    assert len(vector) == 8 and abs(math.hypot(*vector) - 1) < 1e-5


@check
def many() -> None:
    """2,048 texts in one request are embedded in their order"""
    vectors = embedded(TEXTS * 1024, extra_body={"service_tier": "flex"})
    assert are_close(vectors, embedded(TEXTS) * 1024)


@check
def ranking() -> None:
    """documents come back by their relevance, the best ones only with top_n"""
    body = {"model": "ranker", "query": "w1", "documents": ["w2", "w3 w4", "w5"]}
    results = client.post("/rerank", body=body, cast_to=object)["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and {result["index"] for result in results} == {0, 1, 2}
    [best] = client.post("/rerank", body={**body, "top_n": 1}, cast_to=object)["results"]
    assert best["index"] == results[0]["index"]


@check
def wrong_kind() -> None:
    """a chat with an embedding model is a BadRequestError that names its endpoint"""
    try:
        client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "w1"}])
    except BadRequestError as error:
        assert error.code == "wrong_model_kind" and "/v1/embeddings" in str(error)
    else:
        raise AssertionError("no error")


def is_ready() -> bool:
    with urlopen(f"{BASE_URL.removesuffix('/v1')}/ready") as answer:
        return all(json.load(answer)["models"].values())


until_s = time.monotonic() + 120  # the server is there as soon as one of its models is
while time.monotonic() < until_s and not is_ready():
    time.sleep(0.5)
main()
