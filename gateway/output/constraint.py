"""The grammar that a body asks for, in any of the parameters that fix the format of the output text.

Knows the parameters of `Formats`; does not know tools, reasoning or models.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.output.grammar import Source, checked, json_source, lark_source
from gateway.output.json_schema import GrammarError, check_size
from gateway.protocol.bodies.output_format import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuredOutputs,
)
from gateway.protocol.bodies.schemas import GenerationRequest
from gateway.protocol.errors import ApiError, invalid_value, unsupported_parameter
from gateway.protocol.json_body import parse

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# The parameters that say one kind of format each, as the fields of `StructuredOutputs` that mean the same.
_KINDS = {
    **{"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"},
    **{"json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar"},
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A checked grammar of the output text. `param` is the parameter of the body that asks for it."""

    param: str
    source: Source


def is_constrained(request: GenerationRequest) -> bool:
    return bool(_requested(request))


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """Return the constraint of `request`; None if there is none.

    Several parameters may ask for the same format; the first of them decides how strictly its schema is read.
    Raises `ApiError` 400 if they ask for several formats, or if the grammar cannot be used.
    """
    found: Constraint | None = None
    for param, wanted in _requested(request).items():
        try:
            source = _source(param, wanted)
            found = found or Constraint(param, checked(source))
        except GrammarError as error:
            raise unusable(param, error) from None
        if _format(source) != _format(found.source):
            reason = f"it asks for another format than '{found.param}'; send one of them"
            raise invalid_value(param, f"Invalid value for '{param}': {reason}.")
    return found


def unusable(param: str, error: GrammarError) -> ApiError:
    return invalid_value(param, f"Invalid value for '{param}': this format cannot be enforced: {error}.")


def _requested(request: GenerationRequest) -> dict[str, Any]:
    """Return the requested formats by parameters. Those of one kind are returned as `StructuredOutputs`."""
    requested: dict[str, Any] = {}
    if request.response_format is not None and request.response_format.type != "text":
        requested["response_format"] = request.response_format
    if request.structured_outputs is not None:
        requested["structured_outputs"] = request.structured_outputs
    pattern = request.guided_whitespace_pattern
    for param, kind in _KINDS.items():
        value = getattr(request, param)
        if value is not None and value != "":
            requested[param] = StructuredOutputs.model_validate({kind: value, "whitespace_pattern": pattern})
    return requested


def _format(source: Source) -> Mapping[str, Any]:
    """Return `source` without what it says of keywords that cannot be enforced."""
    schema = source.get("json_schema")
    if schema is None:
        return source
    style = {key: value for key, value in schema["x-guidance"].items() if key not in ("lenient", "coerce_one_of")}
    return {"json_schema": {**schema, "x-guidance": style}}


def _source(param: str, wanted: Any) -> Source:
    if isinstance(wanted, StructuredOutputs):
        return _structured(param, wanted)
    if isinstance(wanted, StructuralTagFormat):
        return _structural_tag(wanted)
    if isinstance(wanted, JsonObjectFormat):
        return json_source(_ANY_OBJECT if wanted.schema_ is None else wanted.schema_, lenient=True)
    assert isinstance(wanted, JsonSchemaFormat)
    schema = wanted.json_schema.schema_
    return json_source(_ANY_OBJECT if schema is None else schema, lenient=wanted.json_schema.strict is not True)


def _structured(param: str, wanted: StructuredOutputs) -> Source:
    if wanted.disable_additional_properties:
        raise unsupported_parameter(f"{param}.disable_additional_properties")
    if wanted.regex is not None:
        return _lark_of_regex(wanted.regex)
    if wanted.choice is not None:
        return lark_source("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, wanted.choice)))
    if wanted.grammar is not None:
        return lark_source(_lark(wanted.grammar))
    if wanted.structural_tag is not None:
        tag = parse(StructuralTagFormat, _json_object(wanted.structural_tag))
        return _structural_tag(tag)
    schema = _ANY_OBJECT if wanted.json_ is None else wanted.json_
    if isinstance(schema, str):
        schema = _json_object(schema)
    return json_source(schema, lenient=True, whitespace_pattern=wanted.whitespace_pattern)


def _lark_of_regex(text: str) -> Source:
    from llguidance import LLMatcher  # imported by the first grammar, as in grammar.py

    source: Source = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]
    return {"lark_grammar": source["lark_grammar"]}


def _lark(text: str) -> str:
    """Return a grammar in Lark's syntax. `text` is in Lark's or in GBNF's syntax."""
    from llguidance.gbnf_to_lark import any_to_lark  # as above

    try:
        return any_to_lark(text)
    except Exception as error:  # the converter has no errors of its own
        raise GrammarError(f"it is neither a Lark nor a GBNF grammar ({error})"[:200]) from None


def _structural_tag(wanted: StructuralTagFormat) -> Source:
    from llguidance import StructTag  # as above

    tags = []
    for structure in wanted.structures:
        check_size(structure.schema_)
        trigger = next((t for t in wanted.triggers if structure.begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError("each 'begin' must start with one of the 'triggers'")
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=structure.schema_, end=structure.end))
    return {"lark_grammar": StructTag.to_grammar(tags, assume_special=False)}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise GrammarError("it is not the text of a JSON object")
    return value
