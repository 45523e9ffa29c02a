"""The tools that a body offers to the model, and whether the model must call one.

Knows OpenAI's parameters, also the older `functions`; does not know how a model writes calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
        return self.forced or any(tool.strict for tool in self.callable) or bool(self.callable and not self.parallel)


NO_TOOLS = OfferedTools()


def offered_tools(request: ChatCompletionRequest) -> OfferedTools:
    """Return the tools of `request`. Raises `ApiError` 400 if its choice of tools makes no sense."""
    if request.functions and request.tools:
        raise invalid_value("functions", "Invalid value for 'functions': it cannot be used with 'tools'.")
    if request.functions:
        return _offered_functions(request)
    tools, choice = request.tools or [], request.tool_choice
    _check_names([tool.function.name for tool in tools], "tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid_value("tool_choice", "'tool_choice' is only allowed when 'tools' are specified.")
        return NO_TOOLS
    if choice == "none":
        return NO_TOOLS
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        named = _select(tools, [choice.function.name], "tool_choice.function.name")
        return OfferedTools(_schemas(tools, named, "tools"), _shown(tools), True, False, finish="stop")
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        names = [tool.function.name for tool in allowed.tools]
        chosen = _select(tools, names, "tool_choice.allowed_tools.tools")
        forced = allowed.mode == "required"
        return OfferedTools(_schemas(tools, chosen, "tools"), _shown(chosen), forced, parallel)
    return OfferedTools(_schemas(tools, tools, "tools"), _shown(tools), choice == "required", parallel)


def _offered_functions(request: ChatCompletionRequest) -> OfferedTools:
    functions, choice = request.functions or [], request.function_call
    _check_names([function.name for function in functions], "functions")
    if choice == "none":
        return NO_TOOLS
    tools = [Tool(type="function", function=function) for function in functions]
    if isinstance(choice, FunctionName):
        named = _select(tools, [choice.name], "function_call.name")
        return OfferedTools(_schemas(tools, named, "functions"), _shown(tools), True, False, True, "stop")
    return OfferedTools(_schemas(tools, tools, "functions"), _shown(tools), False, False, True, "function_call")


def _select(tools: Sequence[Tool], names: Sequence[str], param: str) -> list[Tool]:
    selected = [tool for tool in tools if tool.function.name in names]
    if missing := set(names) - {tool.function.name for tool in selected}:
        raise invalid_value(param, f"Invalid value for '{param}': no tool has the name '{min(missing)}'.")
    return selected


def _check_names(names: Sequence[str], param: str) -> None:
    if len(set(names)) < len(names):
        raise invalid_value(param, f"Invalid value for '{param}': each must have a name of its own.")


def _schemas(tools: Sequence[Tool], chosen: Sequence[Tool], param: str) -> tuple[ToolSchema, ...]:
    return tuple(_schema(tool, f"{param}[{i}]", param) for i, tool in enumerate(tools) if tool in chosen)


def _schema(tool: Tool, path: str, param: str) -> ToolSchema:
    function = tool.function
    path = f"{path}.function.parameters" if param == "tools" else f"{path}.parameters"
    return ToolSchema(function.name, function.parameters or NO_ARGUMENTS, bool(function.strict), path)


def _shown(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    return tuple(tool.for_template() for tool in tools)
