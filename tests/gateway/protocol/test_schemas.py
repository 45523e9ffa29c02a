"""Hostile bodies cost one error, however many errors they contain."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.protocol.bodies.messages import MAX_PIECES
from gateway.protocol.bodies.schemas import (
    MAX_PROMPT_IDS,
    MAX_VALUES,
    ChatCompletionRequest,
    CompletionRequest,
    parse_generation,
)
from gateway.protocol.errors import ApiError

MANY = 100_000
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER] * (MAX_PIECES + 1),
        [{"role": "user", "content": [{"type": "text", "text": ""}] * MAX_PIECES}],
        [{"role": "assistant", "tool_calls": [{}] * 128}] * (MAX_PIECES // 128),
    ],
)
def test_the_pieces_of_a_chat_are_bounded(messages: list[Any]) -> None:
    with pytest.raises(ValidationError, match="messages, content parts and tool calls in all"):
        ChatCompletionRequest.model_validate({"model": "m", "messages": messages})
    ChatCompletionRequest.model_validate({"model": "m", "messages": [USER] * 1000})


def test_the_token_ids_of_all_prompts_are_bounded() -> None:
    with pytest.raises(ValidationError, match="token ids in all"):
        CompletionRequest.model_validate({"model": "m", "prompt": [[1] * (MAX_PROMPT_IDS // 8)] * 8})
    CompletionRequest.model_validate({"model": "m", "prompt": [[1] * 1000] * 8})


def _calling(arguments: str | dict[str, Any]) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _values(n: int) -> dict[str, Any]:
    return {"a": [{"b": 1}, *[1] * n]}


def _schema(n: int) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": _values(n)}}


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("tools", lambda n: [{"type": "function", "function": {"name": "f", "parameters": _values(n)}}]),
        ("functions", lambda n: [{"name": "f", "parameters": _values(n)}]),
        ("documents", lambda n: [_values(n)]),
        ("chat_template_kwargs", _values),
        ("response_format", _schema),
        ("messages", lambda n: [USER, _calling(_values(n))]),
        ("messages", lambda n: [USER, *[_calling(json.dumps(_values(n // 8)))] * 8]),
        ("messages", lambda n: [{**USER, "function_call": {"name": "f", "arguments": json.dumps(_values(n))}}]),
    ],
)
def test_what_is_written_as_json_is_bounded(param: str, value: Callable[[int], Any]) -> None:
    """Templates write it in one step, in which nothing else runs."""
    body = {"model": "m", "messages": [USER]}
    parse_generation(ChatCompletionRequest, body | {param: value(MAX_VALUES // 2)})
    with pytest.raises(ApiError) as error:
        parse_generation(ChatCompletionRequest, body | {param: value(MAX_VALUES)})
    assert (error.value.status, error.value.param) == (400, param)
