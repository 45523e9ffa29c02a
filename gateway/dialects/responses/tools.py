"""The tools of /v1/responses: functions, custom tools, namespaces of both, and the choice among them.

A chat has functions only. So a tool of a namespace is the function `<namespace>__<name>` there, and a custom tool is a
function of one string. Tools that need a server of OpenAI's own, such as `web_search`, are left out. Knows both forms;
does not know items or answers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import regex
from pydantic import Field, Tag, model_validator
from pydantic_core import from_json

from gateway.protocol.bodies.messages import Text
from gateway.protocol.bodies.tools import TEXT_GRAMMAR, HostedTool
from gateway.protocol.bodies.validation import choose
from gateway.protocol.json_body import Body

MAX_TOOLS = 128
SEPARATOR = "__"  # between a namespace and a name, as in vLLM
INPUT = "input"  # the argument of a custom tool's function

Name = Annotated[Text, Field(min_length=1)]


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def function(self) -> dict[str, Any]:
        return self.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[Text, Field(min_length=1, max_length=2**16)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "grammar" and (self.syntax is None or self.definition is None):
            raise ValueError("the type grammar needs 'syntax' and 'definition'")
        return self

    def lark(self) -> str:
        """Return the grammar in Lark's syntax."""
        definition = self.definition or ""
        if self.syntax == "lark":
            return definition
        within_slashes: str = regex.sub(r"(\\.)|/", lambda match: match[1] or r"\/", definition)
        return f"start: /{within_slashes}/"


class CustomTool(Body):
    """A tool whose input is a text instead of JSON. The model is told the text's grammar, which is enforced, too."""

    type: Literal["custom"]
    name: Name
    description: Text | None = None
    format: CustomFormat | None = None

    def function(self) -> dict[str, Any]:
        grammar = self.format if self.format is not None and self.format.type == "grammar" else None
        told = f"The input must match this {grammar.syntax} grammar:\n{grammar.definition}" if grammar else ""
        enforced = {TEXT_GRAMMAR: grammar.lark()} if grammar else {}
        return {
            "description": "\n\n".join(part for part in (self.description, told) if part),
            "parameters": {
                "type": "object",
                "properties": {INPUT: {"type": "string", **enforced}},
                "required": [INPUT],
                "additionalProperties": False,
            },
            "strict": False,
        }


def _tag(value: Any) -> str | None:
    """Return the tag of a tool by its type. Types that are not known here are hosted tools."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    return f"<{kind}>" if kind in ("function", "custom", "namespace") else "<hosted>"


_OwnTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    choose(_tag, "a tool of type function or custom"),
]


class NamespaceTool(Body):
    type: Literal["namespace"]
    name: Name
    description: Text | None = None
    tools: Annotated[list[_OwnTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    choose(_tag, "an object with a type"),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedTool(Body):
    type: Literal["function", "custom"]
    name: Name
    namespace: Text | None = None


_Choosable = Annotated[
    Annotated[NamedTool, Tag("<function>")]
    | Annotated[NamedTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    choose(_tag, "an object of type function or custom"),
]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Choosable], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


def _choice_tag(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "<mode>"
    return "<allowed_tools>" if value.get("type") == "allowed_tools" else _tag(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"] | None, Tag("<mode>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[NamedTool, Tag("<custom>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    choose(_choice_tag, "none, auto, required, or an object of type function, custom or allowed_tools"),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call. `path` is its place in the body, such as `tools[2].tools[0]`.

    `preface` is told before its description.
    """

    tool: FunctionTool | CustomTool
    path: str
    namespace: str | None = None
    preface: str = ""

    @property
    def is_custom(self) -> bool:
        return self.tool.type == "custom"

    @property
    def chat_name(self) -> str:
        return chat_name(self.namespace, self.tool.name)

    @property
    def own_name(self) -> dict[str, str]:
        """The fields by which an item names the tool."""
        return {"name": self.tool.name} | ({} if self.namespace is None else {"namespace": self.namespace})

    def chat_tool(self) -> dict[str, Any]:
        function = self.tool.function()
        if self.preface:
            function["description"] = f"{self.preface}\n\n{function.get('description', '')}".strip()
        return {"type": "function", "function": {"name": self.chat_name, **function}}


def offered(tools: Sequence[Any] | None) -> Iterator[OfferedTool]:
    """Yield the tools of a body that the model may call. The first tool of a namespace tells what the namespace is."""
    for index, tool in enumerate(tools or ()):
        if isinstance(tool, FunctionTool | CustomTool):
            yield OfferedTool(tool, f"tools[{index}]")
        elif isinstance(tool, NamespaceTool):
            for number, inner in enumerate(tool.tools):
                preface = tool.description if number == 0 and tool.description else ""
                yield OfferedTool(inner, f"tools[{index}].tools[{number}]", tool.name, preface)


def hosted_choice(choice: Any) -> str | None:
    """Return the type of the first tool in `choice` that is left out; None if it names none."""
    named = choice.tools if isinstance(choice, AllowedTools) else [choice]
    return next((tool.type for tool in named if isinstance(tool, HostedTool)), None)


def chat_choice(choice: Any) -> str | dict[str, Any] | None:
    """Return a choice of tools, which names none that is left out, as in a chat."""
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": chat_name(choice.namespace, choice.name)}}
    if isinstance(choice, AllowedTools):
        return {
            "type": choice.type,
            choice.type: {"mode": choice.mode, "tools": [chat_choice(t) for t in choice.tools]},
        }
    mode: str | None = choice
    return mode


def chat_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def custom_arguments(text: str) -> str:
    """Return the arguments of a custom tool's function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool. `arguments` may be cut, or a text that is not the JSON of an object."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(INPUT, "") if isinstance(found, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
