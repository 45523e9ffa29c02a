"""Schemas of the tools that a body offers, of the choice among them, and of the calls in its conversation.

Knows OpenAI's shapes: `tools`, `tool_choice`, and the older `functions` and `function_call`; and the tools of vendors'
own servers, which other APIs have as well. Does not know how a model writes a call.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.protocol.bodies.validation import choose
from gateway.protocol.errors import ApiError, invalid_request
from gateway.protocol.json_body import Body

MAX_TOOLS = 128  # OpenAI's limit
# Keyword of the schema of a function's argument, a text: a grammar in Lark's syntax for the text.
TEXT_GRAMMAR = "x-lark"

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]  # as in Anthropic's API; OpenAI's allows 64


class FunctionDefinition(Body):
    name: ToolName
    description: Annotated[str, Field(max_length=2**16)] | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of the arguments; None: there are no arguments
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it, without what is not for the model: `strict` and grammars."""
        function = self.function
        described = {"description": function.description} if function.description is not None else {}
        parameters = function.parameters or {"type": "object", "properties": {}}
        shown = without_text_grammars(parameters)
        return {"type": "function", "function": {"name": function.name, **described, "parameters": shown}}


def without_text_grammars(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's arguments without grammars of texts; the same object if it has none."""
    properties = parameters.get("properties")
    if not isinstance(properties, dict):
        return parameters
    have = {name: schema for name, schema in properties.items() if isinstance(schema, dict) and TEXT_GRAMMAR in schema}
    bare = {name: {key: have[name][key] for key in have[name] if key != TEXT_GRAMMAR} for name in have}
    return {**parameters, "properties": {**properties, **bare}} if have else parameters


class HostedTool(Body):
    """A tool that runs on a server of its vendor's, such as `web_search`. It is left out: the model never sees it."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(max_length=256)] | None = None


def names_left_out(tools: Iterable[Body]) -> tuple[str, ...]:
    """Return how the header `x-tidegate-ignored-parameters` names the tools that are left out."""
    return tuple(dict.fromkeys(f"tools.{tool.type}" for tool in tools if isinstance(tool, HostedTool)))


def hosted_tool_chosen(name: str, param: str = "tool_choice") -> ApiError:
    """Return the refusal of a choice that names a tool which is left out."""
    message = (
        f"Invalid value for '{param}': the tool '{name[:64]}' runs on a server of its vendor's, which this server does "
        "not have. Choose a function, or leave the tool out."
    )
    return invalid_request(message, param, "unsupported_parameter")


class FunctionName(Body):
    name: ToolName


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_tag(value: Any) -> str | None:
    if isinstance(value, dict):
        return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"
    return "<mode>" if isinstance(value, str) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")],
    choose(_choice_tag, "'none', 'auto', 'required' or an object that names a tool"),
]
FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("<mode>")]
    | Annotated[FunctionName, Tag("<named>")]
    | Annotated[FunctionName, Tag("<allowed>")],
    choose(_choice_tag, "'none', 'auto' or an object with the name of a function"),
]


class CalledFunction(Body):
    """A call in the conversation. OpenAI's `arguments` are a JSON text; an object is accepted, too."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | dict[str, Any] = ""

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments as an object.

        Templates write the arguments as JSON or go through them, so they would encode a text twice, or fail. If the
        arguments are not the JSON of an object, the object has one key, `invalid_arguments`, with the text.
        """
        return {"name": self.name, "arguments": as_object(self.arguments)}


class ToolCall(Body):
    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        id = {} if self.id is None else {"id": self.id}
        return {**id, "type": "function", "function": self.function.for_template()}


def as_object(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as an object. A text that is no object in JSON is its `invalid_arguments`."""
    if isinstance(arguments, dict):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_arguments": arguments}
