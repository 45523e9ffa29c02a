"""Prepare JSON schemas for llguidance: bound their size, and close their objects.

Knows JSON schema; does not know grammars or bodies.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_PROPERTIES = 1000  # in all objects of a schema; llguidance takes time by the square of the properties of an object
# Levels of nesting, summed over all definitions. llguidance follows references recursively, and the process would die
# of a stack overflow at 1,000 to 2,000 levels.
MAX_LEVELS = 500
_MAX_DEPTH = 64  # levels of nesting of the whole schema, as of a body; a schema can also come as a text
_DEFINITIONS = ("$defs", "definitions")
# Classes and escapes of a regular expression; as a group, what looks around or back, which no grammar can follow.
_LOOKS = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]|\\[^bB1-9k]|(\\.|\(\?<?[=!])", re.DOTALL)
_LOWER = frozenset({"minimum", "exclusiveMinimum"})
_UPPER = frozenset({"maximum", "exclusiveMaximum"})


class GrammarError(ValueError):
    """A grammar or schema that cannot be used. The message is for the user. `param` is the path in the body."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


def check_size(schema: Mapping[str, Any]) -> None:
    """Raise `GrammarError` if the schema would take too much time or memory."""
    if (depth := _depth(schema)) > _MAX_DEPTH:
        raise GrammarError(f"it is nested {depth} levels deep, {_MAX_DEPTH} at most")
    num_properties = sum(len(node["properties"]) for node in _objects(schema) if _has_properties(node))
    if num_properties > MAX_PROPERTIES:
        raise GrammarError(f"it has {num_properties} properties, {MAX_PROPERTIES} at most")
    levels = _depth({key: value for key, value in schema.items() if key not in _DEFINITIONS})
    for name in _DEFINITIONS:
        definitions = schema.get(name)
        levels += sum(map(_depth, definitions.values())) if isinstance(definitions, Mapping) else 0
    if levels > MAX_LEVELS:
        raise GrammarError(f"it has {levels} levels in all of its definitions, {MAX_LEVELS} at most")


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with only the properties that its objects name.

    JSON schema allows any others by default, which weak models would add without end. Objects that speak of other
    properties themselves stay as they are, and so do schemas that join several with `allOf`.
    """
    if any(isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1 for node in _objects(schema)):
        return schema
    result: Mapping[str, Any] = _closed(schema)
    return result


def enforceable(node: Any) -> Any:
    """Return the schema without patterns that look around or back, and without bounds that llguidance cannot count to.

    It counts to 2**63, and takes a higher maximum of an integer for that.
    """
    if isinstance(node, list):
        return [enforceable(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    far = _LOWER if node.get("type") == "integer" else _LOWER | _UPPER
    return {
        key: enforceable(value)
        for key, value in node.items()
        if not (key == "pattern" and _looks(value)) and not (key in far and _is_far(value))
    }


def _looks(pattern: Any) -> bool:
    return isinstance(pattern, str) and any(match[1] for match in _LOOKS.finditer(pattern))


def _is_far(bound: Any) -> bool:
    return isinstance(bound, int | float) and abs(bound) >= 2**63 - 512


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    inner = {key: _closed(value) for key, value in node.items()}
    speaks_of_others = {"additionalProperties", "patternProperties", "unevaluatedProperties"} & node.keys()
    return inner if speaks_of_others or not _has_properties(node) else {**inner, "additionalProperties": False}


def _has_properties(node: Mapping[str, Any]) -> bool:
    """Whether the node is the schema of an object with named properties.

    A property may itself have the name `properties`, but then its value is a schema.
    """
    properties = node.get("properties")
    return isinstance(properties, Mapping) and all(isinstance(value, Mapping | bool) for value in properties.values())


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    rest = [schema]
    while rest:
        node = rest.pop()
        if isinstance(node, Mapping):
            yield node
            rest.extend(node.values())
        elif isinstance(node, list):
            rest.extend(node)


def _depth(value: Any) -> int:
    """Return the number of levels of nesting. The function goes level by level, because recursion could fail."""
    depth, level = 0, [value]
    while level := [child for node in level for child in _children(node)]:
        depth += 1
    return depth


def _children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return node if isinstance(node, list) else []
