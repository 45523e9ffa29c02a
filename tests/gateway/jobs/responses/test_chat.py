"""The translation of /v1/responses into a chat, without a server."""

from typing import Any

import pytest

from gateway.dialects.responses.chat import _options, chat_messages, in_terms_of_responses
from gateway.dialects.responses.items import Item, ItemReference, item_id
from gateway.dialects.responses.request import parse_response_request
from gateway.protocol.errors import ApiError

RESPONSE = "resp_" + "0123456789abcdef" * 2


def kept(items: list[dict[str, Any]]) -> list[Item]:
    given = parse_response_request({"model": "m", "input": items}).input
    assert not isinstance(given, str)
    return [i.kept(item_id(RESPONSE, i.type, n)) for n, i in enumerate(given) if not isinstance(i, ItemReference)]


def test_text_calls_and_reasoning_of_an_assistant_become_one_message() -> None:
    messages = chat_messages(
        kept(
            [
                {"role": "user", "content": "weather?"},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'},
                {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
            ]
        )
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
        {"id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert messages == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "name": "time", "content": "noon"},
    ]


def test_options_get_the_names_of_a_chat() -> None:
    schema = {"type": "object", "properties": {}}
    request = parse_response_request(
        {
            "model": "m",
            "input": "hi",
            "max_output_tokens": 7,
            "text": {
                "format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True},
                "verbosity": "low",
            },
            "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "high", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 3,
        }
    )
    wanted = {
        "max_completion_tokens": 7,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "verbosity": "low",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "high",
        "logprobs": True,
        "top_logprobs": 3,
        "stream": True,
    }
    assert {name: value for name, value in _options(request).items() if value is not None} == wanted


def test_allowed_tools_keep_their_mode() -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools[:1]}
    request = parse_response_request({"model": "m", "input": "hi", "tools": tools, "tool_choice": choice})
    assert _options(request)["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
    }


@pytest.mark.parametrize(
    ("path", "here"),
    [
        ("messages[3].content", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tools[1].function.parameters", "tools[1].parameters"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("reasoning_effort", "reasoning.effort"),
        ("seed", "seed"),
    ],
)
def test_errors_of_the_chat_name_the_parameter_of_the_response(path: str, here: str) -> None:
    with pytest.raises(ApiError) as caught, in_terms_of_responses():
        raise ApiError(400, f"Invalid value for '{path}': no.", param=path, code="invalid_value")
    assert caught.value.param == here
    assert caught.value.message == f"Invalid value for '{here}': no."
