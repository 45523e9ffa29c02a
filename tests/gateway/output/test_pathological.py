"""Schemas and grammars that would take too long, too much memory or the whole process are refused."""

import functools
import json
from typing import Any

import pytest

from gateway.output.constraint import constraint_of
from gateway.protocol.bodies.schemas import CompletionRequest, parse_generation
from gateway.protocol.errors import ApiError


def chain(length: int) -> dict[str, Any]:
    """A schema whose references are followed `length` times, which overflows the stack of llguidance at about 900."""
    links = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "object"}}}


def union(size: int) -> dict[str, Any]:
    objects = [{"type": "object", "properties": {f"a{i}_{size}": {"type": "string"}}} for i in range(size)]
    return {"allOf": [{"anyOf": objects}] * size}


def nested(depth: int) -> str:
    return functools.reduce(lambda inner, _: f'{{"items": {inner}}}', range(depth), "{}")


TAG = {"begin": "<", "end": ">", "schema": chain(1200)}


@pytest.mark.parametrize(
    "body",
    [
        {"guided_json": chain(2000)},
        {"guided_json": union(12)},
        {"guided_json": nested(900)},
        {"guided_grammar": "start: %json " + json.dumps(chain(800))},
        {"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": [TAG]}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": chain(1200)}}},
        {"guided_json": nested(5000)},
        {"guided_json": {"type": "object", "properties": {f"x{i}": {} for i in range(1500)}}},
        {"guided_json": {"type": "object", "properties": {f"x{i}": {"pattern": f"a{{{i}}}"} for i in range(5000)}}},
        {"guided_json": {"enum": ["x" * 50 + str(i) for i in range(20_000)]}},
        {"guided_grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "a"'])},
        {"guided_grammar": "start: " + "(" * 30_000},
        {"guided_grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
        {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    ],
    ids=lambda body: next(iter(body)),
)
def test_it_is_refused(body: dict[str, Any]) -> None:
    request = parse_generation(CompletionRequest, {"model": "m", "prompt": "a", **body})
    with pytest.raises(ApiError) as error:
        constraint_of(request)
    assert error.value.status == 400 and len(error.value.message) < 500


def test_large_schemas_are_accepted() -> None:
    properties = {f"property_{i}": {"$ref": f"#/$defs/d{i % 50}"} for i in range(200)}
    definitions = {f"d{i}": {"type": "array", "items": {"type": "integer", "minimum": i}} for i in range(50)}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    assert constraint_of(CompletionRequest(model="m", prompt="a", guided_json=schema)) is not None
