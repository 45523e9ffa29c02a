"""/openapi.json describes every answer and every error, and names operations that there are."""

import httpx
import jsonschema
import pytest

from gateway.protocol.answer_schemas import ANSWERS, SCHEMAS
from gateway.protocol.openapi import FOLLOWERS
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL

HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CALLS = [
    ("POST", "/v1/chat/completions", HI, "ChatCompletion"),
    ("POST", "/v1/chat/completions", {**HI, "messages": 5}, "Error"),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "hi"}, "Completion"),
    ("POST", "/v1/completions", {"prompt": "hi"}, "Completion"),
    ("POST", "/v1/responses", {"model": MODEL, "input": "hi", "store": False}, "Response"),
    ("POST", "/v1/responses/input_tokens", {"model": MODEL, "input": "hi"}, "InputTokens"),
    ("POST", "/v1/responses/compact", {"input": "hi"}, "Error"),
    ("GET", "/v1/models", None, "ModelList"),
    ("GET", f"/v1/models/{MODEL}", None, "Model"),
    ("GET", "/v1/models/none", None, "Error"),
    ("POST", "/tokenize", {"prompt": "hi"}, "Tokens"),
    ("POST", "/detokenize", {"tokens": [1]}, "TokenText"),
    ("GET", "/ready", None, "Readiness"),
]


def check(answer: httpx.Response, name: str) -> None:
    document = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
    jsonschema.validate(answer.json(), document)


async def test_every_operation_has_its_answer_and_its_errors() -> None:
    async with running_stand() as stand:
        document = (await stand.http.get("/openapi.json")).json()
    operations = {
        (method, path): found for path, all_of in document["paths"].items() for method, found in all_of.items()
    }
    assert set(ANSWERS) <= set(operations)
    assert {key for key in operations if key[1].startswith("/v1/")} <= set(ANSWERS)
    names = [found["operationId"] for found in operations.values()]
    assert len(names) == len(set(names))
    assert {name for links in FOLLOWERS.values() for found in links.values() for name in found} <= set(names)
    assert all(
        {"4XX", "5XX"} <= set(found["responses"]) and "422" not in found["responses"] for found in operations.values()
    )
    body = operations["post", "/v1/chat/completions"]["requestBody"]["content"]["application/json"]["schema"]
    assert MODEL in body["properties"]["model"]["enum"]
    assert "model" not in body["required"]  # as CALLS show
    body = operations["post", "/v1/responses/compact"]["requestBody"]["content"]["application/json"]["schema"]
    assert "model" in body["required"]


async def test_answers_are_as_described() -> None:
    async with running_stand() as stand:
        for method, path, body, name in CALLS:
            check(await stand.http.request(method, path, json=body), name)
    with pytest.raises(jsonschema.ValidationError):
        check(httpx.Response(200, json={"object": "list"}), "ModelList")
