"""Decide for a request how its output is constrained and parsed: by its tools, its response format and the model.

Knows bodies and formats; does not know prompts, tokens or answers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.output.constraint import Constraint, constraint_of, is_constrained, unusable
from gateway.output.grammar import GrammarWriter, serialized
from gateway.output.json_schema import GrammarError
from gateway.output.model_format import ModelFormat
from gateway.output.parser import FormatParser, ParserSettings
from gateway.output.tools.tool_choice import Finish, OfferedTools, offered_tools
from gateway.output.tools.tool_grammar import CallGrammar, Started, after_reasoning
from gateway.protocol.bodies.output_format import Formats
from gateway.protocol.bodies.schemas import AnyRequest, ChatCompletionRequest, CompletionRequest

GenerationPrompt = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the output of a request is constrained and parsed.

    `grammar` is serialised for the engine. `template_values` are for the chat template, beside the messages. `shown`
    are the special tokens that the parser needs, as texts by token ids. `calls_finish` is the finish reason of an
    output with calls; `legacy` is true if the answer has the older `function_call` instead of `tool_calls`.
    """

    grammar: str | None = None
    parser: ParserSettings | None = None
    template_values: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[int, str] = field(default_factory=dict)
    calls_finish: Finish = "tool_calls"
    legacy: bool = False

    def new_parser(self) -> FormatParser | None:
        """Return a parser for one choice; None if all of the output is text."""
        return None if self.parser is None else FormatParser(self.parser)


PLAIN = OutputPlan()


# The fields that concern this module. Most bodies have none of them, and are told apart at the cost of a set operation.
_FIELDS = frozenset({"tools", "tool_choice", "functions", "function_call", "reasoning_effort", *Formats.model_fields})


def has_grammar(request: AnyRequest) -> bool:
    """Whether the output may have a grammar, so that the plan takes some time."""
    if _FIELDS.isdisjoint(request.model_fields_set):
        return False
    has_tools = isinstance(request, ChatCompletionRequest) and bool(request.tools or request.functions)
    return has_tools or is_constrained(request)


def plan_output(
    request: AnyRequest,
    model: ModelFormat,
    generation_prompt: GenerationPrompt,
    template_values: Mapping[str, Any],
    *,
    text_grammars: bool = True,
) -> OutputPlan:
    """Return the plan of a request.

    `generation_prompt` returns the part of the answer that is already in the prompt, for values of the chat template.
    `template_values` are those that the request itself sets; they go before others. Without `text_grammars`, the model
    is told the grammars of texts in calls, but they are not enforced.
    Raises `ApiError` 400 if the tools or the format of the output cannot be used.
    """
    if model.reasoning is None and not template_values and _FIELDS.isdisjoint(request.model_fields_set):
        return PLAIN
    constraint = constraint_of(request)
    if isinstance(request, CompletionRequest):
        return PLAIN if constraint is None else OutputPlan(serialized(constraint.source))
    offered = offered_tools(request)
    offered = offered if text_grammars else offered.without_text_grammars()
    values = {**_template_values(request, offered), **template_values}
    if model.reasoning is None and not offered.callable:
        grammar = None if constraint is None else serialized(constraint.source)
        return OutputPlan(grammar, template_values=values) if grammar or values else PLAIN
    started = Started.by("" if model.reasoning is None else generation_prompt(values), model.reasoning)
    return OutputPlan(
        _chat_grammar(offered, constraint, model, started),
        _parser(request, offered, model, started),
        values,
        model.shown,
        offered.finish,
        offered.legacy,
    )


def _template_values(request: ChatCompletionRequest, offered: OfferedTools) -> dict[str, Any]:
    values: dict[str, Any] = {"tools": list(offered.for_template)} if offered.for_template else {}
    if request.reasoning_effort is not None:
        values["reasoning_effort"] = request.reasoning_effort
        values["enable_thinking"] = request.reasoning_effort != "none"
    return values


def _parser(
    request: ChatCompletionRequest, offered: OfferedTools, model: ModelFormat, started: Started
) -> ParserSettings:
    calls = model.calls if offered.callable else None
    return ParserSettings(
        template=model.with_calls if calls else model.without_calls,
        calls=calls,
        reasoning=model.reasoning,
        schemas={tool.name: tool.parameters for tool in offered.callable},
        new_id=model.new_call_id,
        begins_in_reasoning=started.opened,
        show_reasoning=request.include_reasoning is not False,
        show_text=not offered.forced,
        parallel=offered.parallel,
    )


def _chat_grammar(
    offered: OfferedTools, constraint: Constraint | None, model: ModelFormat, started: Started
) -> str | None:
    if constraint is None and not offered.needs_grammar:
        return None
    writer = GrammarWriter(model.special_ids)
    body = _body(writer, offered, constraint, model)
    return None if body is None else writer.serialized(after_reasoning(writer, model.reasoning, body, started))


def _body(
    writer: GrammarWriter, offered: OfferedTools, constraint: Constraint | None, model: ModelFormat
) -> str | None:
    """Return an expression for what follows the reasoning; None if it cannot be constrained.

    A forced call has no text, so the format of the text says nothing of it.
    """
    markers = model.reasoning.text[:1] if model.reasoning is not None else ()
    before_text = writer.literal(markers[0]) if markers else ""
    text = None if constraint is None or offered.forced else f"{before_text} {writer.source(constraint.source)}"
    if not offered.callable:
        return text
    try:
        grammar = CallGrammar(writer, model.calls, offered.callable)
    except GrammarError as error:
        raise unusable(error.param, error) from None
    calls = grammar.calls(parallel=offered.parallel)
    if offered.forced:
        return calls
    if text is not None:
        return f"({text} | {calls})"
    if markers:
        return f"({before_text} TEXT | {calls})"
    return grammar.text_and_calls(parallel=offered.parallel)
