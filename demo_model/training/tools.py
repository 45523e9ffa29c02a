"""Tools as a conversation shows them: the list of tools in the system turn, calls in an answer, and results.

The text is what the chat template of `tokenizer.py` makes of the same messages. Knows this layout and OpenAI's form of
a tool; does not know which tools there are or who asks for them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `arguments` has the name and the JSON type of each required argument."""

    name: str
    description: str
    arguments: tuple[tuple[str, str], ...]

    def as_openai(self) -> dict[str, Any]:
        """Return the tool as an element of a request's `tools`."""
        properties = {name: {"type": kind} for name, kind in self.arguments}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the tool `name`."""

    name: str
    arguments: Arguments

    def as_openai(self, call_id: str) -> dict[str, Any]:
        """Return the call as an element of a message's `tool_calls`, with its arguments as an object."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


def write_tools(tools: Sequence[Tool]) -> str:
    """Return the list of tools in the system turn.

    A description begins with the words of the tool's name, because the name itself is encoded character by character.
    """
    return "<tools>\n" + "".join(_write_tool(tool) + "\n" for tool in tools) + "</tools>"


def _write_tool(tool: Tool) -> str:
    words = tool.name.replace("_", " ")
    description = f"{words}: {tool.description}" if tool.description else words
    fields = {"description": description, "name": tool.name, "arguments": dict(tool.arguments)}
    return json.dumps(fields, ensure_ascii=False)


def write_calls(calls: Sequence[Call]) -> str:
    """Return the answer that makes `calls`."""
    texts = (json.dumps({"name": c.name, "arguments": dict(c.arguments)}, ensure_ascii=False) for c in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def write_result(result: str) -> str:
    """Return the turn that has the result of one call."""
    return f"<tool_response>\n{result}\n</tool_response>"
