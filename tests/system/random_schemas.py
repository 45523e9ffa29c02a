"""JSON schemas drawn at random, as clients write them for `response_format`: the same seed gives the same schemas."""

import random
from typing import Any

Schema = dict[str, Any]

_WORDS = (
    "name", "title", "city", "amount", "status", "items", "tags", "created_at", "userId", "email", "is_active", "score",
    "address", "notes", "kind", "price", "count", "steps", "final answer", "größe", "x",
)  # fmt: skip
_VALUES = ("red", "green", "in progress", "N/A", 'a "quoted" one', "très bien", "1", "", 0, 1, -2.5, True, False, None)
_PATTERNS = ("^[a-z]{3}$", r"^\d{2}-\d+$", "^(yes|no)$", "^[A-Z][a-z]*$", "[0-9]{4}")
_FORMATS = ("date", "date-time", "time", "uuid", "email", "ipv4")


def random_schemas(seed: int, count: int) -> list[Schema]:
    """Return `count` schemas of objects: nested, with enums, numbers, arrays, strings and optional properties.

    Some use `$defs`, of which some are recursive.
    """
    rng = random.Random(seed)
    return [_document(rng) for _ in range(count)]


def _document(rng: random.Random) -> Schema:
    schema = _object(rng, depth=rng.randint(1, 3))
    if rng.random() < 0.2:
        node = _object(rng, depth=1)
        if rng.random() < 0.5:
            node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/$defs/node"}}
        schema["$defs"] = {"node": node}
        schema["properties"]["root"] = {"$ref": "#/$defs/node"}
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 5))
    strict = rng.random() < 0.5  # as OpenAI's SDKs make them from classes: everything required, nothing else allowed
    schema: Schema = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}}
    required = names if strict else rng.sample(names, rng.randint(0, len(names)))
    if required or rng.random() < 0.5:
        schema["required"] = required
    if strict or rng.random() < 0.5:
        schema["additionalProperties"] = False
    elif rng.random() < 0.3:
        schema["additionalProperties"] = {"type": rng.choice(("string", "integer"))}
    return schema


def _value(rng: random.Random, depth: int) -> Schema:
    kinds = [_text, _text, _number, _number, _choice, _simple]
    if depth > 0:
        kinds += [_several] + 3 * [lambda rng: _object(rng, depth)] + 3 * [lambda rng: _array(rng, depth)]
    schema = rng.choice(kinds)(rng)
    if rng.random() < 0.3:
        schema["description"] = "What the reader should know."
    return schema


def _text(rng: random.Random) -> Schema:
    match rng.randrange(5):
        case 0:
            least = rng.randint(0, 20)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 60)}
        case 1:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case 2:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        case _:
            return {"type": "string"}


def _number(rng: random.Random) -> Schema:
    schema: Schema = {"type": rng.choice(("integer", "number"))}
    low = rng.randint(-100, 100)
    if rng.random() < 0.6:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.6:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.randint(3, 1000)
    if rng.random() < 0.15:
        schema["multipleOf"] = 2 if schema["type"] == "integer" else 0.5
    return schema


def _choice(rng: random.Random) -> Schema:
    if rng.random() < 0.2:
        return {"const": rng.choice(_VALUES)}
    return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}


def _simple(rng: random.Random) -> Schema:
    return {"type": rng.choice(("boolean", "null", ["string", "null"], ["integer", "null"]))}


def _array(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.1:
        return {"type": "array", "prefixItems": [_value(rng, 0), _value(rng, 0)], "items": False, "minItems": 2}
    schema: Schema = {"type": "array", "items": _value(rng, depth - 1)}
    least = rng.randint(0, 3)
    if least and rng.random() < 0.7:
        schema["minItems"] = least
    if rng.random() < 0.5:
        schema["maxItems"] = least + rng.randint(0, 4)
    return schema


def _several(rng: random.Random) -> Schema:
    return {"anyOf": [_value(rng, 0) for _ in range(rng.randint(2, 3))]}
