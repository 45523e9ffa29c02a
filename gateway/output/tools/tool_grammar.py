"""Grammars of tool calls in the format of a model's family, of text with such calls, and of what follows reasoning.

Knows the formats of gateway/output/tools/formats.py, and grammars; does not know requests.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.output.grammar import GrammarWriter, checked, json_source
from gateway.output.json_schema import GrammarError
from gateway.output.tools.call_format import CallFormat, Keywords, ReasoningFormat, Tags
from gateway.protocol.bodies.tools import TEXT_GRAMMAR, without_text_grammars

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
QUOTE = '"'
_ROOT_KEYS = ("$defs", "definitions")  # the parts of a schema to which its properties refer


@dataclass(frozen=True, slots=True)
class ToolSchema:
    name: str
    parameters: Mapping[str, Any]
    strict: bool  # whether keywords of the schema that cannot be enforced are an error
    param: str  # the path of the schema in the body

    @property
    def has_text_grammar(self) -> bool:
        return without_text_grammars(self.parameters) is not self.parameters

    def without_text_grammars(self) -> "ToolSchema":
        return replace(self, parameters=without_text_grammars(self.parameters))


class CallGrammar:
    """The rules of all tools' calls. Raises `GrammarError` if the schema of a tool cannot be used."""

    def __init__(self, writer: GrammarWriter, format: CallFormat, tools: Sequence[ToolSchema]) -> None:
        self._writer = writer
        self._format = format
        self._arguments = [(tool.name, self._checked_arguments(tool)) for tool in tools]

    def calls(self, *, parallel: bool) -> str:
        """Return an expression for one call, or for one or more calls if `parallel` is true."""
        format, call = self._format, self._call(self._format.written)
        more = f"({self._writer.literal(format.separator)} {call})*" if parallel else ""
        return f"{self._writer.literal(format.before)} {call} {more} {self._writer.literal(format.after)}"

    def text_and_calls(self, *, parallel: bool) -> str | None:
        """Return an expression for text in which a call may begin anywhere; None if this family cannot have it."""
        format, writer = self._format, self._writer
        if not format.trigger:
            return None
        begin = f"{writer.until(format.trigger)} {writer.literal(format.before.removeprefix(format.trigger))}"
        first = self._call(format.written if format.before else format.written.removeprefix(format.trigger))
        more = f"({writer.literal(format.separator)} {self._call(format.written)})*"
        rest = f"{more if parallel and format.before else ''} {writer.literal(format.after)}"
        item = writer.rule(f"{begin} {first} {rest}")
        return f"{item}* TEXT" if parallel else f"({item} | TEXT)"

    def _call(self, written: str) -> str:
        """Return the name of a rule for one call of any tool. `written` is the text of a call."""
        alternatives = [self._written(written, name, arguments) for name, arguments in self._arguments]
        return self._writer.rule(" | ".join(alternatives))

    def _written(self, written: str, name: str, arguments: str) -> str:
        before, after = written.split("{arguments}")
        before, after = before.format(name=name), after.format()
        return f"({self._writer.literal(before)} {arguments} {self._writer.literal(after)})"

    def _checked_arguments(self, tool: ToolSchema) -> str:
        try:
            return self._arguments_of(tool)
        except GrammarError as error:
            raise GrammarError(str(error), tool.param) from None

    def _arguments_of(self, tool: ToolSchema) -> str:
        """Return the name of a rule for the arguments of `tool`."""
        schema = _object_schema(tool)
        source = checked(json_source(schema, lenient=not tool.strict))
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        if self._format.keywords is not None:
            return self._keywords(self._format.keywords, schema, properties, required)
        if self._format.tags is None:
            return self._writer.rule(self._object_of_text(properties) or self._writer.source(source))
        tags = [(self._tag(self._format.tags, key, properties[key], schema), key in required) for key in properties]
        return self._writer.rule(" ".join(tag if needed else f"({tag})?" for tag, needed in tags) or '""')

    def _object_of_text(self, properties: Mapping[str, Any]) -> str:
        """Return an expression for an object of one text with a grammar; empty if it is another object."""
        if len(properties) != 1:
            return ""
        [(key, schema)] = properties.items()
        before = self._writer.literal(f"{{{json.dumps(key)}:")
        text = self._json_text(schema)
        return text and f"{before} / ?/ {text} {self._writer.literal('}')}"

    def _json_text(self, schema: Any) -> str:
        """Return an expression for the JSON of a text with a grammar; empty if `schema` has none that can be used."""
        grammar = _text_grammar(schema)
        text = self._writer.terminals_of(grammar, in_json=True) if grammar else ""
        return text and f"{self._writer.literal(QUOTE)} {text} {self._writer.literal(QUOTE)}"

    def _tag(self, tags: Tags, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        before, after = tags.written.split("{value}")
        before = before.format(key=key)
        if _is_text(schema):
            return self._text(before, schema, after)
        return f"{self._writer.literal(before)} {self._json_value(schema, root)} {self._writer.literal(after)}"

    def _keywords(
        self, keywords: Keywords, schema: Mapping[str, Any], properties: Mapping[str, Any], required: Collection[str]
    ) -> str:
        """Return the name of a rule for arguments as keywords, with the required ones first."""
        first = [self._keyword(keywords, key, properties[key], schema) for key in properties if key in required]
        others = [self._keyword(keywords, key, properties[key], schema) for key in properties if key not in required]
        separator = self._writer.literal(keywords.separator)
        begin = f" {separator} ".join(first)
        if begin or not others:
            return self._writer.rule(" ".join([begin, *(f"({separator} {other})?" for other in others)]) or '""')
        beginnings = [
            " ".join([other, *(f"({separator} {later})?" for later in others[i + 1 :])])
            for i, other in enumerate(others)
        ]
        return self._writer.rule(" | ".join([*beginnings, '""']))

    def _keyword(self, keywords: Keywords, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the name of a rule for one argument with its key."""
        before = f"{key}{keywords.assign}"
        if keywords.quote and _is_text(schema):
            return self._writer.rule(self._text(f"{before}{keywords.quote}", schema, keywords.quote))
        return self._writer.rule(f"{self._writer.literal(before)} {self._json_value(schema, root)}")

    def _text(self, before: str, schema: Mapping[str, Any], after: str) -> str:
        """Return an expression for a text of `schema`, which is written without JSON's quotation marks."""
        begin = self._writer.literal(before)
        if "enum" not in schema:
            grammar = _text_grammar(schema)
            return f"{begin} {self._writer.until(after, self._writer.terminals_of(grammar) if grammar else '')}"
        values = " | ".join(self._writer.literal(str(value)) for value in schema["enum"])
        return f"{begin} ({values}) {self._writer.literal(after)}"

    def _json_value(self, schema: Any, root: Mapping[str, Any]) -> str:
        if text := self._json_text(schema):
            return text
        referred = {name: root[name] for name in _ROOT_KEYS if name in root}
        value = {**referred, **schema} if isinstance(schema, Mapping) else {}
        return self._writer.source(json_source(value, lenient=True))


@dataclass(frozen=True, slots=True)
class Started:
    """Whether the prompt has already opened the reasoning of the answer, or has ended it."""

    opened: bool
    closed: bool

    @classmethod
    def by(cls, prompt: str, format: ReasoningFormat | None) -> "Started":
        """Return the state after `prompt`, the part of the answer that is already in the prompt."""
        if format is None:
            return cls(False, False)
        opened, closed = prompt.rfind(format.open), prompt.rfind(format.close)
        return cls(opened > closed, closed > opened)


def after_reasoning(writer: GrammarWriter, format: ReasoningFormat | None, body: str, started: Started) -> str:
    """Return an expression for `body` after the reasoning of the model, if it reasons."""
    if format is None or started.closed:
        return body
    rest = f"{writer.until(format.close)} {writer.literal(format.lead)} /[ \\n]{{0,4}}/"
    if started.opened:
        return f"{rest} {body}"
    return f"({writer.literal(format.open)} {rest})? {body}"


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _text_grammar(schema: Any) -> str:
    """Return the grammar of the text that `schema` describes; empty if it has none."""
    grammar = schema.get(TEXT_GRAMMAR, "") if _is_text(schema) else ""
    if not isinstance(grammar, str):
        raise GrammarError(f"'{TEXT_GRAMMAR}' must be a grammar in Lark's syntax")
    return grammar


def _object_schema(tool: ToolSchema) -> Mapping[str, Any]:
    schema = tool.parameters or NO_ARGUMENTS
    kind = schema.get("type", "object")
    if kind != "object":
        raise GrammarError(f"the parameters of '{tool.name}' must be a schema of type 'object'")
    return {**schema, "type": "object"}
