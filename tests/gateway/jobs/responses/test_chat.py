"""The translation of /v1/responses into a chat, without a server."""

import json
from typing import Any

import pytest

from gateway.dialects.responses.chat import _options, chat_messages, in_terms_of_responses
from gateway.dialects.responses.items import HOSTED_KINDS, Item, ItemReference, item_id
from gateway.dialects.responses.request import parse_response_request
from gateway.dialects.responses.tools import custom_input
from gateway.protocol.errors import ApiError

RESPONSE = "resp_" + "0123456789abcdef" * 2


RUN = {"type": "function", "name": "run", "description": "Run it.", "parameters": {"type": "object"}}
# As an agent sends them: a tool of OpenAI's server, a function, and a namespace with a function and a custom tool.
AGENT_TOOLS: list[Any] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "function", "name": "shell", "strict": False},
    {
        "type": "namespace",
        "name": "team",
        "description": "Other agents.",
        "tools": [
            RUN,
            {
                "type": "custom",
                "name": "note",
                "format": {"type": "grammar", "syntax": "regex", "definition": "a+|b"},
            },
        ],
    },
    {
        "type": "custom",
        "name": "patch",
        "description": "Edit.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
    },
]


def kept(items: list[dict[str, Any]]) -> list[Item]:
    given = parse_response_request({"model": "m", "input": items}).items
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
        ("tools[0].function.parameters", "tools[1].parameters"),
        ("tools[1].function.name", "tools[2].tools[0].name"),
        ("tools[2].function.parameters", "tools[2].tools[1].format"),
        ("tools", "tools"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("reasoning_effort", "reasoning.effort"),
        ("seed", "seed"),
    ],
)
def test_errors_of_the_chat_name_the_parameter_of_the_response(path: str, here: str) -> None:
    tools = parse_response_request({"model": "m", "input": "hi", "tools": AGENT_TOOLS}).offered_tools
    with pytest.raises(ApiError) as caught, in_terms_of_responses(tools):
        raise ApiError(400, f"Invalid value for '{path}': no.", param=path, code="invalid_value")
    assert caught.value.param == here
    assert caught.value.message == f"Invalid value for '{here}': no."


def test_tools_of_agents_become_functions() -> None:
    request = parse_response_request({"model": "m", "input": "hi", "tools": AGENT_TOOLS})
    functions = {tool["function"]["name"]: tool["function"] for tool in _options(request)["tools"]}
    assert list(functions) == ["shell", "team__run", "team__note", "patch"]
    assert functions["shell"] == {"name": "shell", "strict": False}
    assert functions["team__run"]["description"] == "Other agents.\n\nRun it."
    inputs = {name: functions[name]["parameters"]["properties"]["input"] for name in ("team__note", "patch")}
    assert inputs["team__note"] == {"type": "string", "x-lark": "start: /a+|b/"}
    assert inputs["patch"] == {"type": "string", "x-lark": 'start: "x"'}
    assert functions["patch"]["description"] == 'Edit.\n\nThe input must match this lark grammar:\nstart: "x"'
    assert request.ignored_names == ("tools.web_search",)


def test_tools_may_be_items_of_the_input() -> None:
    items = [{"type": "additional_tools", "role": "developer", "tools": AGENT_TOOLS}, {"role": "user", "content": "hi"}]
    request = parse_response_request({"model": "m", "input": items, "tools": [RUN]})
    names = [tool["function"]["name"] for tool in _options(request)["tools"]]
    assert names == ["run", "shell", "team__run", "team__note", "patch"]
    assert len(request.input) == 1
    with pytest.raises(ApiError, match="this server takes items"):
        parse_response_request({"model": "m", "input": [{"type": "additional_tools", "tools": 3}]})


@pytest.mark.parametrize(
    ("choice", "in_chat"),
    [
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
        (
            {"type": "function", "name": "run", "namespace": "team"},
            {"type": "function", "function": {"name": "team__run"}},
        ),
    ],
)
def test_a_choice_names_the_function(choice: dict[str, Any], in_chat: dict[str, Any]) -> None:
    request = parse_response_request({"model": "m", "input": "hi", "tools": AGENT_TOOLS, "tool_choice": choice})
    assert _options(request)["tool_choice"] == in_chat


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "mcp", "server_label": "x"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
    ],
)
def test_a_choice_of_a_tool_that_is_left_out_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=f"'{choice.get('tools', [choice])[0]['type']}' runs on a server") as caught:
        parse_response_request({"model": "m", "input": "hi", "tools": AGENT_TOOLS, "tool_choice": choice})
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


def test_calls_of_agents_tools_are_read_back() -> None:
    messages = chat_messages(
        kept(
            [
                {"type": "function_call", "call_id": "c1", "namespace": "team", "name": "run", "arguments": "{}"},
                {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'say "é"\n'},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            ]
        )
    )
    functions = [call["function"] for call in messages[0]["tool_calls"]]
    assert functions[0] == {"name": "team__run", "arguments": "{}"}
    assert functions[1]["name"] == "patch" and json.loads(functions[1]["arguments"]) == {"input": 'say "é"\n'}
    assert [(message["name"], message["content"]) for message in messages[1:]] == [("team__run", "1"), ("patch", "2")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "cut', "cut"),
        ('{"input": {"a": 1}}', '{"a": 1}'),
        ('{"other": 1}', ""),
        ("[1]", "[1]"),
        ("no JSON", "no JSON"),
    ],
)
def test_the_input_of_a_custom_tool(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


@pytest.mark.parametrize("kind", HOSTED_KINDS)
def test_items_of_hosted_tools_leave_what_stands_around_them(kind: str) -> None:
    thought = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in ("hm", "so")]
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]}
    hosted = {"type": kind, "id": "x_1", "call_id": "c", "output": {"type": "computer_screenshot"}, "status": "odd"}
    messages = chat_messages(kept([{"role": "user", "content": "1 + 2?"}, thought[0], hosted, thought[1], answer]))
    assert messages[1:] == [{"role": "assistant", "content": "3", "reasoning_content": "hm\nso"}]
