"""Errors for clients of Anthropic's API: their shape, their types, and words that say the way out."""

from typing import Any

import pytest

from gateway.identity import Keyring
from tests.gateway.api_keys import key
from tests.gateway.dialects.messages.test_answers import HI, TOOLS
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "abcd"}}
FILE = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}
SEEN = {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}
ODD = {"type": "x"}
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("no maximum", {"max_tokens": None}, "'max_tokens'"),
    ("a negative maximum", {"max_tokens": -1}, "'max_tokens'"),
    ("no messages", {"messages": None}, "'messages'"),
    ("empty messages", {"messages": []}, "'messages'"),
    ("an odd role", {"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role'"),
    ("an image", {"messages": [{"role": "user", "content": [IMAGE]}]}, "takes no images"),
    ("an image in a result", {"messages": [{"role": "user", "content": [SEEN]}]}, "takes no images"),
    ("a file of Anthropic's", {"messages": [{"role": "user", "content": [FILE]}]}, "'messages[0].content[0].source'"),
    ("a document", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "of the type 'document'"),
    ("a tool without a schema", {"tools": [{"name": "add"}]}, "'tools[0].input_schema'"),
    (
        "an odd schema",
        {"tools": [{**TOOLS[0], "strict": True, "input_schema": ODD}]},
        "'tools[0].input_schema",
    ),
    ("an unknown tool", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "'tool_choice.name'"),
    ("a choice without tools", {"tool_choice": {"type": "any"}}, "'tool_choice'"),
    ("an odd format", {"output_config": {"format": {"type": "json_schema", "schema": ODD}}}, "output_config"),
    ("an unknown tier", {"service_tier": "turbo"}, "'service_tier'"),
    ("a misspelt name", {"max_token": 5}, "'max_tokens'"),
    ("a name of chats", {"stop": ["x"]}, "'stop_sequences'"),
    ("too long a prompt", {"messages": [{"role": "user", "content": "x" * 300}]}, f"tokens > {CONTEXT} maximum"),
]


@pytest.mark.parametrize(("_", "body", "words"), FAULTS, ids=[name for name, _, _ in FAULTS])
async def test_faults_are_named(_: str, body: dict[str, Any], words: str) -> None:
    async with running_stand() as running:
        answer = await running.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": HI, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"type", "error", "request_id"}
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "invalid_request_error")
    assert words in answer.json()["error"]["message"]
    assert answer.json()["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(("path", "more"), [("", {"max_tokens": 9}), ("/count_tokens", {})])
@pytest.mark.parametrize("size", [CONTEXT, 100_000])
async def test_a_prompt_that_is_too_long_is_counted(path: str, more: Any, size: int) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * size}], **more}
    async with running_stand() as running:
        answer = await running.post(f"/v1/messages{path}", body)
    if path and size == CONTEXT:
        assert answer.json()["input_tokens"] > CONTEXT
        return
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")
    assert answer.json()["error"]["message"].endswith(f" tokens > {CONTEXT} maximum")


@pytest.mark.parametrize(("path", "more"), [("", {"max_tokens": 9}), ("/count_tokens", {})])
async def test_an_unknown_model_is_told_the_ways_out(path: str, more: Any) -> None:
    async with running_stand() as running:
        answer = await running.post(f"/v1/messages{path}", {"model": "claude-x", "messages": HI, **more})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    message = answer.json()["error"]["message"]
    assert "`claude-x`" in message and "--served-model-name" in message and "ANTHROPIC_MODEL" in message


async def test_keys_come_in_either_header() -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": HI}
    async with running_stand(keyring=Keyring([key("ann")])) as running:
        found = {
            name: await running.post("/v1/messages", body, headers=headers)
            for name, headers in (
                ("x-api-key", {"x-api-key": "sk-ann"}),
                ("bearer", {"authorization": "Bearer sk-ann"}),
                ("wrong", {"x-api-key": "sk-bob"}),
                ("none", {}),
            )
        }
    assert {name: answer.status_code for name, answer in found.items()} == {
        **{"x-api-key": 200, "bearer": 200},
        **{"wrong": 401, "none": 401},
    }
    assert found["none"].json()["error"]["type"] == "authentication_error"


async def test_a_body_that_is_no_json_and_a_server_without_workers() -> None:
    async with running_stand(with_worker=False) as running:
        odd = await running.http.post("/v1/messages", content=b"not json")
        busy = await running.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": HI})
    assert (odd.status_code, odd.json()["error"]["type"]) == (400, "invalid_request_error")
    assert (busy.status_code, busy.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize(
    ("path", "headers", "is_anthropics"),
    [
        ("/v1/messages/nothing", {}, True),
        ("/v1/nothing", {"anthropic-version": "2023-06-01"}, True),
        ("/v1/nothing", {}, False),
        ("/v1/messagesx", {}, False),
    ],
)
async def test_who_gets_which_shape(path: str, headers: dict[str, str], is_anthropics: bool) -> None:
    async with running_stand() as running:
        answer = await running.http.get(path, headers=headers)
    assert answer.status_code == 404
    assert (answer.json().get("type") == "error") == is_anthropics


async def test_the_root_answers_head() -> None:
    async with running_stand() as running:
        assert (await running.http.head("/")).status_code == 200
