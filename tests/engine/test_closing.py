"""Outputs under a grammar end within their limit, whatever the model says, and are not changed far from it."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import Grammars, Matcher
from engine.interface import EngineInfo
from tests.engine.test_grammar import DEMO, allowed, ids, letters, regex

__all__ = ["letters"]  # a fixture

GRAMMARS = Grammars(DEMO)
STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": True}
RECURSIVE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["value"],
    "additionalProperties": False,
}
STEPS: dict[str, Any] = {  # as OpenAI's example of a parsed answer
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
                "additionalProperties": False,
            },
        },
        "final_answer": {"type": "string"},
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
}
PATTERNS = [
    # Zod's for an e-mail address, which clients send for `z.email()`, and two that people write.
    r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^[^@]+@[^@]+\.[^@]+$",
    r"^[a-zA-Z0-9_.+-]+@[a-zA-Z0-9-]+\.[a-zA-Z0-9-.]+$",
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)$",
]


def text_that_matches(pattern: str) -> dict[str, Any]:
    properties = {"text": {"type": "string", "pattern": pattern}}
    return {"type": "object", "properties": properties, "required": ["text"], "additionalProperties": False}


def matcher_of(schema: dict[str, Any], limit: int | None) -> Matcher:
    source = {"name": "output", "json_schema": {**schema, "x-guidance": STYLE}}
    return GRAMMARS.compile(json.dumps({"grammars": [source]})).matcher(limit)


def output_of(matcher: Matcher, limit: int, seed: int) -> tuple[list[int], bool]:
    """Return the tokens that a model with random logits samples, and whether it has ended by itself.

    A part of the logits stays the same, so that the model has tokens that it prefers at every step.
    """
    rng = np.random.default_rng(seed)
    bias = rng.normal(0, 3, DEMO.vocab_size)
    bias[list(DEMO.eos_token_ids)] = -100
    tokens: list[int] = []
    while len(tokens) < limit:
        bits = np.unpackbits(GRAMMARS.masks([matcher])[0].view(np.uint8), bitorder="little")[: DEMO.vocab_size]
        logits = np.where(bits, bias + rng.normal(0, 2, DEMO.vocab_size), -np.inf)
        token_id = int(logits.argmax())
        if token_id in DEMO.eos_token_ids:
            return tokens, True
        tokens.append(token_id)
        matcher.consume([token_id])
    return tokens, False


def text_of(tokens: list[int]) -> str:
    return GRAMMARS._tokenizer.decode_str(tokens)


def shortest(schema: dict[str, Any]) -> int:
    """Return the number of tokens of the shortest answer that is known, the end-of-sequence token too."""
    matcher = matcher_of(schema, None)  # compiles, so that the closer is there
    assert GRAMMARS._closer is not None
    way = GRAMMARS._closer.way(matcher.inner, 512, [])
    assert way is not None
    return len(way)


NAMES = st.sampled_from(["a", "name", "kind", "a longer name", "värde", "x_1"])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(
        lambda n, m: {"type": "string", "minLength": n, "maxLength": n + m}, st.integers(0, 4), st.integers(0, 9)
    ),
    st.just({"type": "string"}),
    st.sampled_from([{"type": kind} for kind in ("integer", "number", "boolean", "null")]),
    st.builds(
        lambda n, m: {"type": "integer", "minimum": n, "maximum": n + m}, st.integers(-50, 50), st.integers(0, 99)
    ),
    st.builds(lambda values: {"enum": values}, st.lists(NAMES, min_size=1, max_size=4, unique=True)),
    st.sampled_from([{"type": "string", "pattern": pattern} for pattern in ("^[a-z]{3}$", "^\\d{2}-\\d+$")]),
    st.sampled_from([{"type": "string", "format": name} for name in ("date", "uuid", "email")]),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
        required = list(properties)[:num_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(made, st.dictionaries(NAMES, inner, min_size=1, max_size=4), st.integers(0, 4))


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        objects(inner),
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(lambda several: {"anyOf": several}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(SCHEMAS, st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_whatever_fits_ends_as_its_schema_says(schema: dict[str, Any], spare: int, seed: int) -> None:
    limit = shortest(schema) + spare
    tokens, ended = output_of(matcher_of(schema, limit), limit, seed)
    assert ended, text_of(tokens)
    jsonschema.validate(json.loads(text_of(tokens)), schema)


@pytest.mark.parametrize("schema", [STEPS, RECURSIVE, {"type": "object"}, {}, *map(text_that_matches, PATTERNS)])
@pytest.mark.parametrize("limit", [40, 200])
def test_open_ended_answers_end(schema: dict[str, Any], limit: int) -> None:
    for seed in range(3):
        tokens, ended = output_of(matcher_of(schema, limit), limit, seed)
        assert ended, text_of(tokens)
        jsonschema.validate(json.loads(text_of(tokens)), schema)


def test_a_pattern_ends_with_its_quote_once_it_may() -> None:
    assert shortest(text_that_matches("^[A-Z]{2}[0-9]+$")) <= shortest(text_that_matches("^[A-Z]{2}[0-9]{2}$"))


def test_what_does_not_fit_is_left_alone() -> None:
    limit = shortest(STEPS) - 3
    assert output_of(matcher_of(STEPS, limit), limit, 1) == output_of(matcher_of(STEPS, None), limit, 1)


def test_a_text_that_fits_without_its_end_is_kept_whole() -> None:
    limit = shortest(STEPS) - 1
    tokens, _ = output_of(matcher_of(STEPS, limit), limit, 1)
    jsonschema.validate(json.loads(text_of(tokens)), STEPS)


def test_an_output_far_from_its_limit_is_not_changed() -> None:
    free, _ = output_of(matcher_of(STEPS, None), 300, 1)
    bounded, _ = output_of(matcher_of(STEPS, 600), 300, 1)
    assert bounded == free


def test_a_sequence_that_is_continued_elsewhere_gets_the_same_tokens() -> None:
    whole, _ = output_of(matcher_of(STEPS, 120), 120, 1)
    for at in (30, 90, 110):
        continued = matcher_of(STEPS, 120)
        continued.consume(whole[:at])
        once, again = matcher_of(STEPS, 120), GRAMMARS.masks([continued])[0]
        for token_id in whole[:at]:
            GRAMMARS.masks([once])
            once.consume([token_id])
        assert (GRAMMARS.masks([once])[0] == again).all()


def test_a_vocabulary_without_quotes_and_brackets(letters: EngineInfo) -> None:
    grammars = Grammars(letters)
    matcher = grammars.compile(regex("[ab]*-[0-9]{3}")).matcher(limit=6)
    matcher.consume(ids("a"))
    assert allowed(grammars.masks([matcher]), 40) == [set(ids("-"))]
