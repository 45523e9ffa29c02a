"""Translate a request of /v1/responses into the body of a chat, and errors of that body back.

Knows the fields of both APIs; does not know how a chat is answered. The body is validated like any other chat, so each
parameter of the chat endpoint keeps its meaning and its limits here.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gateway.dialects.responses.items import Item, text_of, unsealed
from gateway.dialects.responses.request import ResponseRequest, TextFormat
from gateway.dialects.responses.tools import OfferedTool, chat_choice, chat_name, custom_arguments
from gateway.dialects.terms import path_here, renamed
from gateway.protocol.bodies.schemas import ChatCompletionRequest, parse_generation
from gateway.protocol.errors import ApiError

# Parameters of a chat, and what they are here.
PATHS = (
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("logprobs", "include"),
)


_TOOL = re.compile(r"tools\[(\d+)\](?:\.function(?:(\.parameters.*)|(.*)))?")  # a path of a chat's tool
SUMMARY = "Summary of our conversation so far:"  # stands before the text of a compaction
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")


def chat_request(request: ResponseRequest, items: Sequence[Item]) -> ChatCompletionRequest:
    """Return the chat that answers `request`. `items` is the whole conversation, without the instructions.

    Raises `ApiError` 400 if the chat is invalid. The error names parameters as in the Responses API.
    """
    messages = chat_messages(items)
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    body = {**request.extensions, "model": request.model, "messages": messages, **_options(request)}
    with in_terms_of_responses(request.offered_tools):
        return parse_generation(ChatCompletionRequest, {name: v for name, v in body.items() if v is not None})


@contextmanager
def in_terms_of_responses(tools: Sequence[OfferedTool] = ()) -> Iterator[None]:
    """Raise each `ApiError` of the block with the parameter's path in the Responses API instead of the chat's path.

    `tools` are the tools of the chat.
    """
    try:
        yield
    except ApiError as error:
        old = error.param or ""
        new = _path(old, tools)
        if new == old:
            raise
        raise renamed(error, new) from error


def chat_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the items of a conversation as chat messages.

    An assistant's reasoning, text and calls are several items, but become one message.
    """
    messages: list[dict[str, Any]] = []
    names = {item["call_id"]: _name_in_chat(item) for item in items if item["type"] in CALLS}
    reasoning = ""
    for item in items:
        if item["type"] == "reasoning":
            reasoning = "\n".join(filter(None, (reasoning, text_of(item["content"] or item["summary"]))))
            continue
        if item["type"] in CALLS:
            _add_call(messages, item, reasoning)
        elif item["type"] in OUTPUTS:
            message = {"role": "tool", "tool_call_id": item["call_id"], "content": _content_of(item["output"])}
            name = names.get(item["call_id"])
            messages.append(message if name is None else message | {"name": name})
        elif item["type"] == "compaction":
            text = f"{SUMMARY}\n{unsealed(item['encrypted_content'])}"
            messages.append({"role": "assistant", "content": text})
        else:
            message = {"role": item["role"], "content": _content_of(item["content"])}
            messages.append(_with_reasoning(message, reasoning) if item["role"] == "assistant" else message)
        reasoning = ""
    return messages


def _content_of(value: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a kept item's content or output as that of a chat message: its text, or parts if there are images."""
    if isinstance(value, str) or all(part["type"] != "input_image" for part in value):
        return text_of(value)
    return [_chat_part(part) for part in value]


def _chat_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "input_image":
        return {"type": "text", "text": text_of([part])}
    return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}


def _add_call(messages: list[dict[str, Any]], item: Item, reasoning: str) -> None:
    if not messages or messages[-1]["role"] != "assistant" or reasoning:
        messages.append(_with_reasoning({"role": "assistant", "content": None}, reasoning))
    is_custom = item["type"] == "custom_tool_call"
    arguments = custom_arguments(item["input"]) if is_custom else item["arguments"]
    function = {"name": _name_in_chat(item), "arguments": arguments}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _name_in_chat(call: Item) -> str:
    return chat_name(call.get("namespace"), call["name"])


def _with_reasoning(message: dict[str, Any], reasoning: str) -> dict[str, Any]:
    return message | {"reasoning_content": reasoning} if reasoning else message


def _options(request: ResponseRequest) -> dict[str, Any]:
    text, tools = request.text, [tool.chat_tool() for tool in request.offered_tools]
    return {
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": True if request.wants_logprobs else None,
        "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
        "response_format": _response_format(text.format) if text and text.format else None,
        "verbosity": text.verbosity if text else None,
        "tools": tools or None,
        "tool_choice": chat_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls if tools else None,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "metadata": request.metadata,
        "service_tier": request.service_tier,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        # Tokens are needed as they come, also to tell those of the text from those of the reasoning.
        "stream": bool(request.stream or request.background or request.wants_logprobs),
    }


def _response_format(text: TextFormat) -> dict[str, Any] | None:
    if text.type != "json_schema":
        return None if text.type == "text" else {"type": text.type}
    fields = {"name": text.name, "schema": text.schema_, "strict": text.strict, "description": text.description}
    return {"type": text.type, text.type: {name: value for name, value in fields.items() if value is not None}}


def _path(path: str, tools: Sequence[OfferedTool]) -> str:
    if (place := _TOOL.fullmatch(path)) and int(place[1]) < len(tools):
        tool = tools[int(place[1])]
        return f"{tool.path}.format" if tool.is_custom and place[2] else tool.path + (place[2] or place[3])
    return path_here(path, PATHS) or path
