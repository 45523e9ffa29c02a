"""Calls in the form of Python's and Gemma's, with all kinds of values, and what is no call."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.output.tools.formats import named_call_format
from gateway.output.tools.keyword_calls import KeywordCalls
from tests.gateway.output.test_families import parse

TOOLS = {"look": {}, "add_user": {}}
PYTHONIC = "[func_name1("


def cuts(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def calls(text: str, template: str = PYTHONIC) -> list[tuple[str, dict[str, Any]]]:
    reasoning, shown, found = parse(text, template, [3], schemas=TOOLS)
    assert (reasoning, shown) == ("", ""), text
    return [(call["name"], call["arguments"]) for call in found]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("'San José'", "San José"),
        (r"'it\'s \"so\"'", 'it\'s "so"'),
        ('"a, b) [c"', "a, b) [c"),
        ("-2.5", -2.5),
        ("None", None),
        ("null", None),
        ("[True, false]", [True, False]),
        ("{'a': {'b': [1, ('x',)]}}", {"a": {"b": [1, ["x"]]}}),
        ("{}", {}),
        ("Paris", "Paris"),  # as the template of Llama 3.2 writes texts
        ("1e999", "1e999"),  # JSON has no infinity
        ("len('a')", "len('a')"),
        ("b'a'", "b'a'"),
        ("", ""),
    ],
)
def test_values_of_python_and_json(value: str, expected: Any) -> None:
    assert calls(f"[look(value={value}, more=1)]") == [("look", {"value": expected, "more": 1})]


def test_calls_of_gemma_4() -> None:
    text = '<|tool_call>call:look{at:<|"|>a, "b"}<|"|>,deep:{x:[1,<|"|>y:z<|"|>],ok:true},none:null}<tool_call|>'
    expected = {"at": 'a, "b"}', "deep": {"x": [1, "y:z"], "ok": True}, "none": None}
    assert calls(f"{text}<|tool_call>call:look{{}}<tool_call|>", "<|tool_call>") == [("look", expected), ("look", {})]


@pytest.mark.parametrize(
    "text", ["[1] is a footnote.", "[unknown(a=1)]", "[look", "Use [look(a=1)].", "[](look)", "[unknown(a='look']"]
)
def test_other_text_is_no_call(text: str) -> None:
    assert parse(text, PYTHONIC, [3], schemas=TOOLS) == ("", text, [])


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda values: st.lists(values) | st.dictionaries(st.text(), values),
        max_leaves=8,
    )
)
def test_any_value_is_read_back(value: Any) -> None:
    assert calls(f"[look(a={value!r}, b={json.dumps(value)})]") == [("look", {"a": value, "b": value})]


@settings(max_examples=100)
@given(st.text(alphabet="[](){}'\"\\,=a1"), st.integers(1, 5))
def test_no_text_breaks_the_reader(text: str, size: int) -> None:
    format = named_call_format("pythonic")
    assert format.keywords is not None
    reader = KeywordCalls(format.header, format.keywords, TOOLS)
    parts = [part for cut in cuts(f"[look({text})]", size) for part in reader.feed(cut)]
    whole = "".join(part.arguments for part in [*parts, *reader.close(cut=False)] if part.name is None)
    assert json.loads(whole) is not None
