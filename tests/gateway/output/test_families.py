"""Each family's calls are found by its template, read back from its rendering, and forced by a grammar in that form."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Backend

from gateway.output.grammar import GrammarWriter
from gateway.output.model_format import ModelFormat
from gateway.output.parser import FormatParser, ParserSettings
from gateway.output.piece import Piece, whole_tool_calls
from gateway.output.tools.call_format import reasoning_format
from gateway.output.tools.formats import CALL_FORMAT_NAMES, call_format, named_call_format
from gateway.output.tools.tool_grammar import CallGrammar, ToolSchema
from tests.gateway.output.families import FAMILIES, Family
from tests.gateway.tiny_model import pretrained

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
SCHEMAS = {"get_weather": WEATHER, "now": NO_ARGUMENTS}
CALLS: list[dict[str, Any]] = [
    {"name": "get_weather", "arguments": {"city": 'Paris "20e" {[\\', "days": 3}},
    {"name": "now", "arguments": {}},
]
THINK = "<think></think>"
PARTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def parse(
    text: str, template: str, sizes: Sequence[int] = (10**6,), *, format: str = "auto", **options: Any
) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the reasoning, the text and the calls in `text`, which the parser gets in parts of the given sizes."""
    model = ModelFormat.of(template, {}, format)
    numbers = itertools.count()
    shown = {"schemas": SCHEMAS, "new_id": lambda: f"call_{next(numbers)}", **options}
    parser = FormatParser(ParserSettings(model.with_calls, model.calls, model.reasoning, **shown))
    output, sizes_again = Piece(), itertools.cycle(sizes)
    while text:
        size = next(sizes_again)
        output.extend(parser.feed(text[:size]))
        text = text[size:]
    output.extend(parser.flush())
    assert not parser.ended_in_call
    calls = whole_tool_calls(output.tool_calls)
    assert [(call.index, call.id) for call in calls] == [(i, f"call_{i}") for i in range(len(calls))]
    return output.reasoning, output.text, [{"name": c.name, "arguments": json.loads(c.arguments)} for c in calls]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_every_family_has_a_rendering() -> None:
    assert {family.format for family in FAMILIES} == set(CALL_FORMAT_NAMES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.format)
class TestFamily:
    def test_the_template_shows_the_format(self, family: Family) -> None:
        format = call_format(family.template)
        assert format is not None and format.name == family.format

    @settings(max_examples=20)
    @given(sizes=PARTS)
    def test_calls_are_read_back_however_they_are_cut(self, family: Family, sizes: list[int]) -> None:
        calls = CALLS[:1] if family.one else CALLS
        assert parse(family.render(calls), family.template, sizes) == ("", "", calls)

    def test_a_call_cut_by_the_limit_of_tokens_does_no_harm(self, family: Family) -> None:
        text = family.render(CALLS[:1])
        for end in range(len(text)):
            model = ModelFormat.of(family.template, {})
            parser = FormatParser(ParserSettings(model.with_calls, model.calls, None, SCHEMAS, lambda: "a"))
            whole = whole_tool_calls([*parser.feed(text[:end]).tool_calls, *parser.flush().tool_calls])
            assert [call.name for call in whole] in ([], ["get_weather"])
            assert parser.ended_in_call == any(not _is_json(call.arguments) for call in whole)

    def test_forced_calls_have_the_form_of_the_template(self, family: Family) -> None:
        grammar = forced(family, {})
        assert accepts(LLTokenizer("byte"), grammar, family.render(CALLS[:1]).strip()), family.render(CALLS[:1])
        if not family.one:
            text = family.render(CALLS).strip().replace(":1<", ":0<").replace('id": "1"', 'id": "0"')
            assert accepts(LLTokenizer("byte"), grammar, text), text

    def test_forced_calls_are_read_back(self, family: Family) -> None:
        text = sample(LLTokenizer("byte"), forced(family, {}, parallel=False))
        (call,) = parse(text, family.template)[2]
        assert call["name"] in SCHEMAS
        assert set(call["arguments"]) == set(SCHEMAS[call["name"]]["properties"])

    def test_markers_that_are_special_tokens_are_written_as_such(self, family: Family) -> None:
        format = named_call_format(family.format)
        marker = format.trigger or family.render(CALLS[:1]).removeprefix("[")[:4]
        backend = Backend.from_str(pretrained().backend_tokenizer.to_str())
        backend.add_special_tokens([marker])
        ids = {marker: backend.token_to_id(marker)}
        grammar = forced(family, ids, parallel=False)
        tokenizer = LLTokenizer(backend.to_str(), eos_token=[1])
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.get_error()
        tokens = backend.encode(family.render(CALLS[:1]).strip(), add_special_tokens=False).ids
        assert ids[marker] in tokens
        assert matcher.consume_tokens(tokens) and matcher.is_accepting()


def forced(family: Family, special_ids: dict[str, int], parallel: bool = True) -> str:
    writer = GrammarWriter(special_ids)
    tools = [ToolSchema(name, schema, True, "tools") for name, schema in SCHEMAS.items()]
    return writer.serialized(CallGrammar(writer, named_call_format(family.format), tools).calls(parallel=parallel))


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.get_error()
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def sample(tokenizer: LLTokenizer, grammar: str) -> str:
    """Return an output that follows `grammar`: always the last token that is allowed, or what ends a string."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens: list[int] = []
    while not matcher.is_stopped():
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(256) if bits[i // 8] >> i % 8 & 1]
        ends = [i for i in allowed if chr(i) in '"<\n']
        tokens.append((ends or [i for i in allowed if i < 127] or allowed)[-1])
        assert matcher.consume_token(tokens[-1]) and len(tokens) < 1000
    return tokenizer.decode_str(tokens)


@given(st.text(alphabet=st.characters(codec="utf-8")), PARTS)
def test_plain_text_stays_as_it_is(text: str, sizes: list[int]) -> None:
    assert parse(text, "<tool_call>" + THINK, sizes) == ("", text, []) or "<t" in text


@settings(max_examples=20)
@given(PARTS)
def test_reasoning_text_and_calls_are_told_apart(sizes: list[int]) -> None:
    call = FAMILIES[0].render(CALLS[:1])
    text = f"<think>\nLet me see. <tool_call>?\n</think>\n\nOne moment.\n{call}\n"
    template = FAMILIES[0].template + THINK
    assert parse(text, template, sizes) == ("Let me see. <tool_call>?", "One moment.", CALLS[:1])
    hidden = parse(text, template, sizes, show_reasoning=False)
    assert hidden == ("", "One moment.", CALLS[:1])


@settings(max_examples=20)
@given(PARTS)
def test_reasoning_that_the_prompt_has_opened(sizes: list[int]) -> None:
    template = "<tool_call>" + THINK
    assert parse("\nHm.\n</think>\n\nYes. ", template, sizes, begins_in_reasoning=True) == ("Hm.", "Yes. ", [])
    assert parse("\nHm, cut", template, sizes, begins_in_reasoning=True) == ("Hm, cut", "", [])


@settings(max_examples=20)
@given(PARTS)
def test_the_channels_of_harmony(sizes: list[int]) -> None:
    template = FAMILIES[-1].template + "<|channel|>analysis<|message|><|end|>"
    assert reasoning_format(template) is not None
    start = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert parse(start + "<|channel|>final<|message|>Yes.", template, sizes) == ("Hm.", "Yes.", [])
    preamble = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    call = FAMILIES[-1].render(CALLS[:1])
    assert parse(start + preamble + call, template, sizes) == ("Hm.", "One moment.", CALLS[:1])


def test_calls_with_their_keys_in_another_order() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    assert parse(text, "<tool_call>")[2] == [{"name": "f", "arguments": {"a": 1}}]
    text = '<tool_call>{"type": "function", "function": {"name": "f", "parameters": "{}"}}</tool_call>'
    assert parse(text, "<tool_call>")[2] == [{"name": "f", "arguments": {}}]


def test_calls_in_json_after_text() -> None:
    text = 'One moment: {"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "a"}} Done.'
    calls = [{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "a"}}]
    assert parse(text, "", [3], format="llama3_json") == ("", "One moment:", calls)


@pytest.mark.parametrize("body", ["no JSON", "[1]", '{"name": 5}', '{"arguments": {}}', "null"])
def test_broken_calls_are_shown_as_text(body: str) -> None:
    assert parse(f"<tool_call>{body}</tool_call>", "<tool_call>") == ("", body, [])


def test_only_the_first_call_counts_if_calls_are_not_parallel() -> None:
    assert parse(FAMILIES[0].render(CALLS), "<tool_call>", parallel=False)[2] == CALLS[:1]


def test_values_of_tags_have_the_types_of_the_schema() -> None:
    schema = {"properties": {"text": {"type": "string"}, "list": {"type": "array"}, "flag": {"type": "boolean"}}}
    text = FAMILIES[1].render([{"name": "f", "arguments": {"text": "5", "list": "[1]", "flag": "true", "odd": "x y"}}])
    text = text.replace("</function>", "<parameter=huge>\n1e999\n</parameter>\n</function>")
    (call,) = parse(text, FAMILIES[1].template, schemas={"f": schema})[2]
    assert call["arguments"] == {"text": "5", "list": [1], "flag": True, "odd": "x y", "huge": "1e999"}
