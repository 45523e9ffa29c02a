"""The grammar that a body asks for, in any of the parameters that fix the format of the output text.

Knows OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`; does not know tools, reasoning or models.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

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


@dataclass(frozen=True, slots=True)
class Constraint:
    """A checked grammar of the output text. `param` is the parameter of the body that asks for it."""

    param: str
    source: Source


def is_constrained(request: GenerationRequest) -> bool:
    return bool(_requested(request))


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """Return the constraint of `request`; None if there is none.

    Raises `ApiError` 400 if there are several, or if the grammar cannot be used.
    """
    requested = _requested(request)
    if not requested:
        return None
    (param, wanted), *others = requested.items()
    if others:
        raise invalid_value(others[0][0], f"Invalid value for '{others[0][0]}': it cannot be used with '{param}'.")
    try:
        return Constraint(param, checked(_source(param, wanted)))
    except GrammarError as error:
        raise unusable(param, error) from None


def unusable(param: str, error: GrammarError) -> ApiError:
    return invalid_value(param, f"Invalid value for '{param}': this format cannot be enforced: {error}.")


def _requested(request: GenerationRequest) -> dict[str, Any]:
    """Return the requested formats by parameters. The older parameters are returned as `StructuredOutputs`."""
    requested: dict[str, Any] = {}
    if request.response_format is not None and request.response_format.type != "text":
        requested["response_format"] = request.response_format
    if request.structured_outputs is not None:
        requested["structured_outputs"] = request.structured_outputs
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            pattern = request.guided_whitespace_pattern
            requested[f"guided_{kind}"] = StructuredOutputs.model_validate({kind: value, "whitespace_pattern": pattern})
    return requested


def _source(param: str, wanted: Any) -> Source:
    if isinstance(wanted, StructuredOutputs):
        return _structured(param, wanted)
    if isinstance(wanted, StructuralTagFormat):
        return _structural_tag(wanted)
    if isinstance(wanted, JsonObjectFormat):
        return json_source(_ANY_OBJECT, lenient=False)
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
    source: Source = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]
    return {"lark_grammar": source["lark_grammar"]}


def _lark(text: str) -> str:
    """Return a grammar in Lark's syntax. `text` is in Lark's or in GBNF's syntax."""
    try:
        return any_to_lark(text)
    except Exception as error:  # the converter has no errors of its own
        raise GrammarError(f"it is neither a Lark nor a GBNF grammar ({error})"[:200]) from None


def _structural_tag(wanted: StructuralTagFormat) -> Source:
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
