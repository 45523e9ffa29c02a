"""Translate a request of Anthropic's Messages API into a chat, and errors of that chat back.

Knows the fields of both APIs; does not know how a chat is answered. The chat is validated like any other one, so each
parameter of the chat endpoint keeps its meaning and its limits here.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gateway.dialects.messages.blocks import (
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
    content_of,
)
from gateway.dialects.messages.request import (
    EXTENSIONS,
    MOVED,
    ClientTool,
    JsonFormat,
    MessageParam,
    MessagesRequest,
    Thinking,
    ToolChoice,
)
from gateway.dialects.terms import path_here, refuse_moved, renamed
from gateway.protocol.bodies.schemas import ChatCompletionRequest, parse_generation
from gateway.protocol.bodies.tools import HostedTool, hosted_tool_chosen, names_left_out
from gateway.protocol.bodies.unsupported import unknown_names
from gateway.protocol.errors import ApiError, ContextLengthExceeded, invalid_request
from gateway.protocol.json_body import parse

Message = dict[str, Any]

# A header that Claude Code writes into its system prompt. It changes with each request, so that no prompt would begin
# as the one before, and the prefix cache would never be used.
BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
KNOWN = frozenset({*MessagesRequest.model_fields, *EXTENSIONS})
# Parameters of a chat, and what they are here.
PATHS = (
    ("messages", "messages"),
    ("stop", "stop_sequences"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
)


def chat_to_answer(body: dict[str, Any]) -> ChatCompletionRequest:
    """Return the chat that answers the body of POST /v1/messages.

    Raises `ApiError` 400 if a parameter is wrong or not built. The error names parameters as in the Messages API.
    """
    if body.get("max_tokens") is None:
        raise invalid_request("Missing required parameter: 'max_tokens'.", "max_tokens", "missing_required_parameter")
    return chat_to_count(body)


def chat_to_count(body: dict[str, Any]) -> ChatCompletionRequest:
    """Return the chat whose prompt is counted for the body of POST /v1/messages/count_tokens, as `chat_to_answer`."""
    refuse_moved(body, MOVED, "Messages")
    request = parse(MessagesRequest, body)
    extensions = {name: value for name, value in body.items() if name in EXTENSIONS}
    fields = {**extensions, "messages": chat_messages(request), **_options(request)}
    with in_terms_of_messages():
        chat = parse_generation(ChatCompletionRequest, {name: v for name, v in fields.items() if v is not None})
    chat._ignored = unknown_names(body, KNOWN) + names_left_out(request.tools or ())
    chat._limit_shrinks = True
    return chat


@contextmanager
def in_terms_of_messages() -> Iterator[None]:
    """Raise each `ApiError` of the block with the words and the parameter paths of the Messages API."""
    try:
        yield
    except ContextLengthExceeded as error:
        counted = f"at least {error.limit + 1}" if error.num_tokens is None else error.num_tokens
        message = f"prompt is too long: {counted} tokens > {error.limit} maximum"
        raise ApiError(400, message, param="messages", code=error.code) from error
    except ApiError as error:
        if error.code == "model_not_found":
            error.message += (
                " To serve it under this name, start the server with it as one more --served-model-name; or "
                "let the client ask for a model of GET /v1/models (Claude Code: ANTHROPIC_MODEL)."
            )
        if error.param is None:
            raise
        raise renamed(error, _path(error.param)) from error


def chat_messages(request: MessagesRequest) -> list[Message]:
    """Return the system prompt and the messages of a request as those of a chat.

    Turns of one role that follow each other become one, as in Anthropic's API.
    """
    messages: list[Message] = []
    parts = [BILLING_HEADER.sub("", block.text) for block in blocks_of(request.system or "")]
    _append(messages, {"role": "system", "content": "\n".join(filter(None, parts))})
    for message in request.messages:
        for translated in _translated(message):
            _append(messages, translated)
    return messages


def _append(messages: list[Message], message: Message) -> None:
    if not message["content"] and message["role"] == "system":
        return
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    last["content"] = _joined(last["content"], message["content"])
    for name in message.keys() - {"role", "content"}:  # a turn of the assistant's: its reasoning and its calls
        last[name] = last[name] + message[name] if name in last else message[name]


def _joined(first: str | list[Any], second: str | list[Any]) -> str | list[Any]:
    if isinstance(first, str) and isinstance(second, str):
        return "\n".join(filter(None, (first, second)))
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content for content in (first, second)
    ]
    return [*parts[0], *parts[1]]


def _translated(message: MessageParam) -> list[Message]:
    """Return one message as those of a chat: results of tools are messages of their own, and come first."""
    blocks = blocks_of(message.content)
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": content_of(block.content)}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    content = content_of(blocks)
    if message.role != "assistant":
        has_content = not results or any(isinstance(block, TextBlock | ImageBlock) for block in blocks)
        return [*results, {"role": message.role, "content": content}] if has_content else results
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    reasoning = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    extras = {"tool_calls": calls, "reasoning_content": reasoning}
    return [{"role": "assistant", "content": content, **{name: value for name, value in extras.items() if value}}]


def _options(request: MessagesRequest) -> dict[str, Any]:
    tools = [_tool(tool) for tool in request.tools or () if isinstance(tool, ClientTool)]
    choice, output = request.tool_choice, request.output_config
    wanted = (output.format if output else None) or request.output_format
    last = request.messages[-1]
    return {
        "model": request.model,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
        "tools": tools or None,
        "tool_choice": _tool_choice(choice, request.tools or (), has_tools=bool(tools)) if choice else None,
        "parallel_tool_calls": False if tools and choice and choice.disable_parallel_tool_use else None,
        "reasoning_effort": _effort(request.thinking, output.effort if output else None),
        "include_reasoning": False if request.thinking and request.thinking.display == "omitted" else None,
        "response_format": _response_format(wanted) if wanted else None,
        "service_tier": "default" if request.service_tier == "standard_only" else request.service_tier,
        # The answer goes on where a last turn of the assistant's ends.
        "continue_final_message": True if last.role == "assistant" and _is_text(last) else None,
        "stream": request.stream,
        # The first event reports how much of the prompt was cached.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if request.stream else None,
    }


def _is_text(message: MessageParam) -> bool:
    return not any(isinstance(block, ToolUseBlock) for block in blocks_of(message.content))


def _tool(tool: ClientTool) -> dict[str, Any]:
    fields = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {**fields, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice, tools: Sequence[ClientTool | HostedTool], has_tools: bool) -> Any:
    """Return the choice as that of a chat. Raises `ApiError` 400 if it names a tool that is left out."""
    if choice.type != "tool":
        return {"auto": "auto" if has_tools else None, "any": "required", "none": "none"}[choice.type]
    if any(isinstance(tool, HostedTool) and tool.name == choice.name for tool in tools):
        raise hosted_tool_chosen(choice.name or "", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _effort(thinking: Thinking | None, effort: str | None) -> str | None:
    """Return how much the model shall reason, as a chat says it; None: as it does by itself."""
    if thinking is not None and thinking.type == "disabled":
        return "none"
    return effort or ("medium" if thinking is not None and thinking.type == "enabled" else None)


def _response_format(wanted: JsonFormat) -> dict[str, Any]:
    return {"type": wanted.type, wanted.type: {"name": "output", "schema": wanted.schema_, "strict": True}}


def _path(path: str) -> str:
    if path.startswith("tools["):
        return path.replace(".function.parameters", ".input_schema", 1).replace(".function.", ".", 1)
    return path_here(path, PATHS) or path
