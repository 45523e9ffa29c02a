"""The tools that a body offers to the model, and whether the model must call one.

Knows OpenAI's parameters, also the older `functions`; does not know how a model writes calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.output.tools.tool_grammar import NO_ARGUMENTS, ToolSchema
from gateway.protocol.bodies.schemas import ChatCompletionRequest
from gateway.protocol.bodies.tools import AllowedToolsChoice, FunctionName, NamedTool, Tool
from gateway.protocol.errors import invalid_value

Finish = Literal["tool_calls", "stop", "function_call"]


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that may be called.

    `for_template` are those that the model sees. If `forced` is true, the output is one or more calls. `parallel` is
    false if only one call is allowed. `legacy` is true if the body has `functions` instead of `tools`. `finish` is the
    finish reason of an output with calls.
    """

    callable: tuple[ToolSchema, ...] = ()
    for_template: tuple[dict[str, Any], ...] = ()
    forced: bool = False
    parallel: bool = True
    legacy: bool = False
    finish: Finish = "tool_calls"

    @property
    def needs_grammar(self) -> bool:
        """Whether calls must be constrained: if one must be made, must match its schema, or must be the only one."""
        needed = any(tool.strict or tool.has_text_grammar for tool in self.callable)
        return self.forced or needed or bool(self.callable and not self.parallel)

    def without_text_grammars(self) -> "OfferedTools":
        return replace(self, callable=tuple(tool.without_text_grammars() for tool in self.callable))


NO_TOOLS = OfferedTools()


def offered_tools(request: ChatCompletionRequest) -> OfferedTools:
    """Return the tools of `request`. Raises `ApiError` 400 if its choice of tools makes no sense."""
    if request.functions and request.tools:
        raise invalid_value("functions", "Invalid value for 'functions': it cannot be used with 'tools'.")
    tools, legacy = request.tools or [], bool(request.functions)
    if request.functions:
        tools = [Tool(type="function", function=function) for function in request.functions]
    param, asked = ("functions", request.function_call) if legacy else ("tools", request.tool_choice)
    _check_names([tool.function.name for tool in tools], param)
    if not tools and asked not in (None, "none", "auto"):
        raise invalid_value("tool_choice", "'tool_choice' is only allowed when 'tools' are specified.")
    if not tools or asked == "none":
        return NO_TOOLS
    chosen, shown, forced = tools, tools, asked == "required"
    parallel = request.parallel_tool_calls is not False and not legacy
    finish: Finish = "function_call" if legacy else "tool_calls"
    if isinstance(asked, AllowedToolsChoice):
        names = [tool.function.name for tool in asked.allowed_tools.tools]
        chosen = shown = _select(tools, names, "tool_choice.allowed_tools.tools")
        forced = asked.allowed_tools.mode == "required"
    elif isinstance(asked, NamedTool):
        chosen = _select(tools, [asked.function.name], "tool_choice.function.name")
    elif isinstance(asked, FunctionName):
        chosen = _select(tools, [asked.name], "function_call.name")
    if isinstance(asked, NamedTool | FunctionName):
        forced, parallel, finish = True, False, "stop"
    schemas = tuple(_schema(tool, f"{param}[{i}]", param) for i, tool in enumerate(tools) if tool in chosen)
    return OfferedTools(schemas, tuple(tool.for_template() for tool in shown), forced, parallel, legacy, finish)


def _select(tools: Sequence[Tool], names: Sequence[str], param: str) -> list[Tool]:
    selected = [tool for tool in tools if tool.function.name in names]
    if missing := set(names) - {tool.function.name for tool in selected}:
        raise invalid_value(param, f"Invalid value for '{param}': no tool has the name '{min(missing)}'.")
    return selected


def _check_names(names: Sequence[str], param: str) -> None:
    if len(set(names)) < len(names):
        raise invalid_value(param, f"Invalid value for '{param}': each must have a name of its own.")


def _schema(tool: Tool, path: str, param: str) -> ToolSchema:
    function = tool.function
    path = f"{path}.function.parameters" if param == "tools" else f"{path}.parameters"
    return ToolSchema(function.name, function.parameters or NO_ARGUMENTS, bool(function.strict), path)
