"""The plan of a request: its grammar, its parser and its values for the chat template, and what is refused."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.output.model_format import ModelFormat
from gateway.output.plan import PLAIN, OutputPlan, plan_output
from gateway.protocol.bodies.schemas import ChatCompletionRequest, CompletionRequest, parse_generation
from gateway.protocol.errors import ApiError

HERMES = "<tool_call>"
QWEN3 = "<tool_call><think></think>"
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a"],
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or ADD, **more}}


TOOLS = [tool("add"), tool("now", {"type": "object", "properties": {}})]
STRICT = [tool("add", strict=True)]
ADDED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def plan(template: str = HERMES, prompt: str = "", **body: Any) -> OutputPlan:
    request = {"model": "m", "messages": [{"role": "user", "content": "a"}], **body}
    chat = parse_generation(ChatCompletionRequest, request)
    return plan_output(chat, ModelFormat.of(template, {}), lambda values: prompt, {})


def completion(**body: Any) -> OutputPlan:
    request = parse_generation(CompletionRequest, {"model": "m", "prompt": "a", **body})
    return plan_output(request, ModelFormat.of(HERMES, {}), lambda values: "", {})


def allows(made: OutputPlan, text: str) -> bool:
    """Whether `text` is a whole output that the grammar of a plan allows."""
    assert made.grammar is not None
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, made.grammar, log_level=0)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def refused(**body: Any) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as error:
        plan(**body)
    assert error.value.status == 400 and error.value.type == "invalid_request_error"
    return error.value.param, error.value.message


def test_a_plain_chat_has_neither_grammar_nor_parser() -> None:
    for body in ({}, {"tools": []}, {"response_format": {"type": "text"}}, {"tools": TOOLS, "tool_choice": "none"}):
        made = plan(**body)
        assert (made.grammar, made.parser, made.template_values) == (None, None, {})


def test_allowed_tools_are_the_only_ones_that_the_model_sees() -> None:
    names = [{"type": "function", "function": {"name": "now"}}]
    made = plan(
        tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    )
    assert allows(made, NOW) and not allows(made, ADDED) and len(made.template_values["tools"]) == 1


def test_strict_tools_constrain_calls_but_not_text() -> None:
    made = plan(tools=STRICT)
    for text in ("", "Hi <tool", f"Hi\n{ADDED}", f"{ADDED}\n{ADDED}"):
        assert allows(made, text), text
    assert not allows(made, ADDED.replace("1", '"x"')) and not allows(made, "<tool_call>?")
    single = plan(tools=STRICT, parallel_tool_calls=False)
    assert allows(single, f"Hi {ADDED}") and not allows(single, f"{ADDED}\n{ADDED}") and allows(single, "Hi")


def test_older_functions() -> None:
    functions = [TOOLS[0]["function"], TOOLS[1]["function"]]
    assert plan(functions=functions).calls_finish == "function_call"
    made = plan(functions=functions, function_call={"name": "now"})
    assert made.legacy and made.calls_finish == "stop" and allows(made, NOW) and not allows(made, ADDED)
    assert plan(functions=functions, function_call="none").parser is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
LISTED = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {}]}', "[]"),
        ({"response_format": JSON_SCHEMA}, '{"a": 5}', '{"a": 5, "b": 1}'),
        ({"response_format": JSON_SCHEMA}, '{"a":5}', '{"a":  5}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, '{"a":5}', "5"),
        ({"response_format": LISTED}, 'a <f>{"a": 1}</f> b', "a <f>1</f>"),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": 5}', '{"a": "5"}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 5}', '{"a": "5"}'),
        ({"structured_outputs": {"json_object": True}}, "{}", "5"),
        ({"structured_outputs": {"regex": "[a-c]{2}/"}}, "ab/", "ad/"),
        ({"structured_outputs": {"choice": ["yes", "no\n", 'é"']}}, 'é"', "y"),
        ({"structured_outputs": {"choice": [str(i) for i in range(4000)]}}, "3999", "4000"),
        ({"structured_outputs": {"grammar": 'start: "a" b\nb: "c"+'}}, "acc", "a"),
        ({"structured_outputs": {"structural_tag": json.dumps(LISTED)}}, "a", "<f>?"),
        ({"guided_json": {"type": "boolean"}}, "true", "1"),
        ({"guided_regex": "a+"}, "aa", "b"),
        ({"guided_choice": ["a", "ab"]}, "ab", "b"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "b", "c"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 5}', '{"a": "5"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, '{"a": 5}', '{"a": "5"}'),
        ({"json_schema": SCHEMA}, '{"a": 5}', '{"a": "5"}'),
        ({"json_schema": json.dumps(SCHEMA)}, '{"a": 5}', '{"a": "5"}'),
        ({"regex": "a+"}, "aa", "b"),
        ({"ebnf": 'root ::= "a" | "b"'}, "b", "c"),
        ({"grammar": 'root ::= [a-c]+ " " num\nnum ::= [0-9]{2}'}, "abc 12", "abc 1"),
        ({"grammar": 'start: "a" b\nb: "c"+'}, "acc", "a"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]*"}, '{   "a": 5}', '{\n"a": 5}'),
    ],
)
def test_formats_of_the_text(body: dict[str, Any], good: str, bad: str) -> None:
    for made in (plan(**body), completion(**body)):
        assert allows(made, good) and not allows(made, bad)


def test_one_format_in_several_spellings() -> None:
    same = {"response_format": JSON_SCHEMA, "guided_json": SCHEMA, "json_schema": json.dumps(SCHEMA)}
    strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for body in (same, {**same, "response_format": strict}, {"regex": "a", "guided_regex": "a"}):
        assert plan(**body).grammar == plan(**dict([next(iter(body.items()))])).grammar
    other = {"response_format": JSON_SCHEMA, "guided_json": SCHEMA, "json_schema": {}}
    assert refused(**other) == (
        "json_schema",
        "Invalid value for 'json_schema': it asks for another format than 'response_format'; send one of them.",
    )


def test_empty_texts_ask_for_no_format() -> None:
    assert plan(grammar="", regex="", ebnf="").grammar is None  # as llama.cpp's clients send them
    assert completion(grammar="").grammar is None


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_keywords_that_cannot_be_enforced() -> None:
    named = {"name": "x", "schema": UNIQUE}
    for body in ({"response_format": {"type": "json_schema", "json_schema": named}}, {"guided_json": UNIQUE}):
        assert allows(plan(**body), '{"a": []}')
    param, message = refused(response_format={"type": "json_schema", "json_schema": {**named, "strict": True}})
    assert param == "response_format" and "uniqueItems" in message
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert allows(plan(guided_json=overlapping), "5")
    strict = {"name": "x", "schema": {"type": "object", "properties": {"a": overlapping}}, "strict": True}
    message = refused(response_format={"type": "json_schema", "json_schema": strict})[1]
    assert "oneOf whose schemas may overlap; use anyOf" in message and "option" not in message


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # Pydantic's, for the text of a Decimal


def test_patterns_that_look_around_count_as_keywords_that_cannot_be_enforced() -> None:
    schema = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": DECIMAL}}}
    assert allows(plan(guided_json=schema), '{"pattern": "1.50"}')
    call = '<tool_call>\n{"name": "f", "arguments": {"pattern": "2"}}\n</tool_call>'
    assert allows(plan(tools=[tool("f", schema)], tool_choice="required"), call)
    strict = {"name": "x", "schema": schema, "strict": True}
    param, message = refused(response_format={"type": "json_schema", "json_schema": strict})
    assert param == "response_format" and "look-behind, is not supported: ^(?!^[-+.]*$)" in message
    kept = {"type": "string", "pattern": r"^[(?=]\\bcd$"}  # a class of three characters, and an escaped backslash
    assert not allows(plan(guided_json=kept), '"a"') and allows(plan(guided_json=kept), r'"(\\bcd"')


@pytest.mark.parametrize(
    ("bounds", "value", "beyond"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-5", str(2**64)),  # of int64
        (
            {"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308},
            "0.5",
            "-1",
        ),  # of a double
        ({"type": "number", "exclusiveMinimum": -1e19, "exclusiveMaximum": 1}, "-2", "1.5"),
    ],
)
def test_bounds_beyond_64_bits_count_as_keywords_that_cannot_be_enforced(
    bounds: dict[str, Any], value: str, beyond: str
) -> None:
    made = plan(guided_json=bounds)
    assert allows(made, value) and not allows(made, beyond)
    strict = {"name": "x", "schema": {"type": "object", "properties": {"a": bounds}}, "strict": True}
    assert "range: min=" in refused(response_format={"type": "json_schema", "json_schema": strict})[1]


def test_a_format_and_tools_together() -> None:
    made = plan(tools=TOOLS, response_format=JSON_SCHEMA)
    assert allows(made, '{"a": 5}') and allows(made, ADDED) and not allows(made, "Hi")
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("required", named):  # as agents ask that have a type of output and must call a tool first
        forced = plan(tools=TOOLS, response_format=JSON_SCHEMA, tool_choice=choice)
        assert allows(forced, ADDED) and not allows(forced, '{"a": 5}')
        assert forced.grammar == plan(tools=TOOLS, tool_choice=choice).grammar


def test_formats_and_calls_come_after_the_reasoning() -> None:
    made = plan(QWEN3, "<|im_start|>assistant\n", response_format=JSON_SCHEMA)
    for text in ('{"a": 5}', '<think>\nHm. {"b"}\n</think>\n\n{"a": 5}'):
        assert allows(made, text)
    assert not allows(made, '<think>Hm.</think>{"b": 5}')
    opened = plan(QWEN3, "<|im_start|>assistant\n<think>\n", response_format=JSON_SCHEMA)
    assert allows(opened, 'Hm.\n</think>\n\n{"a": 5}') and not allows(opened, '{"a": 5}')
    assert opened.parser is not None and opened.parser.begins_in_reasoning
    closed = plan(QWEN3, "<think>\n\n</think>\n\n", tools=TOOLS, tool_choice="required")
    assert allows(closed, NOW) and not allows(closed, f"<think>a</think>{NOW}")


BROKEN = {"type": "object", "properties": {"a": {"type": "foo"}}}


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (
            {"tools": [tool("f", BROKEN)], "tool_choice": "required"},
            "tools[0].function.parameters",
            "Invalid type: foo",
        ),
        ({"tools": [tool("f", {"type": "array"}, strict=True)]}, "tools[0].function.parameters", "type 'object'"),
        ({"tools": [tool("f"), tool("f")]}, "tools", "a name of its own"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed when 'tools'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "no tool has the name 'g'",
        ),
        ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions", "cannot be used with 'tools'"),
        (
            {"functions": [{"name": "f"}], "function_call": {"name": "g"}},
            "function_call.name",
            "no tool has the name 'g'",
        ),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "another format than 'guided_json'"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_json": {"pattern": "["}}, "guided_json", "unclosed character class: ["),
        ({"guided_grammar": "start: foo"}, "guided_grammar", 'unknown name: "foo"'),
        ({"guided_grammar": "nothing"}, "guided_grammar", "cannot be enforced"),
        ({"guided_json": "{"}, "guided_json", "not the text of a JSON object"),
        ({"guided_json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "guided_json", "Unsatisfiable"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no output can match it"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "not supported",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
    ],
)
def test_what_is_refused(body: dict[str, Any], param: str, reason: str) -> None:
    refused_param, message = refused(**body)
    assert refused_param == param and reason in message


def test_each_field_of_the_plan_makes_a_plan() -> None:
    """A field that the plan does not know would be ignored in silence."""
    for fields in (
        {"tools": TOOLS},
        {"functions": [TOOLS[0]["function"]]},
        {"reasoning_effort": "low"},
        {"response_format": JSON_SCHEMA},
        {"structured_outputs": {"regex": "a"}},
        {"guided_json": {}},
        {"guided_regex": "a"},
        {"guided_choice": ["a"]},
        {"guided_grammar": 'start: "a"'},
        {"json_schema": {}},
        {"regex": "a"},
        {"ebnf": 'root ::= "a"'},
        {"grammar": 'start: "a"'},
    ):
        assert plan(**fields) is not PLAIN, fields
