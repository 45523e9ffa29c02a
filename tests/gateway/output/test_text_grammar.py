"""A grammar of texts means the same as one terminal, and inside a JSON string."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from gateway.output.grammar import GrammarWriter, lark_source, serialized
from gateway.output.json_schema import GrammarError
from gateway.output.text_grammar import as_terminals
from gateway.output.tools.formats import named_call_format
from gateway.output.tools.tool_grammar import CallGrammar, ToolSchema
from gateway.protocol.bodies.tools import TEXT_GRAMMAR, without_text_grammars
from tests.gateway.output.families import FAMILIES, Family

# A grammar of patches, as agents send them.
PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
FIX = '*** Begin Patch\n*** Update File: a"b\\c.py\n@@ def f():\n-\tx = "1"\n+\tx = "é\\n"\n*** End Patch\n'
# What the grammar says, and texts of which some match.
GRAMMARS = [
    (PATCH, FIX),
    ('start: (A | b)+\nA: /[^a-y"]/\n?b: "\\"" -> quote', 'z\n"'),
    ("start: /[\\s\\S]*;/", "\\\n;"),
    ("start: LINE+\nLINE: /.*/s SPACE\n%import common (NEWLINE, CR)\n%import common.WS -> SPACE", "a\r\n\n"),
    ('start: "a\\n"i B ~ 2..3\nB: /[^\\w\\s]|\\x22|\\u000a/', 'A\n"\n'),
    (
        'start: WORD (SPACES WORD)* # words\nSPACES: /[\\x20\\t]+/\nWORD: "a".."c" | /\\\\/i // or a backslash',
        "a\tb \\",
    ),
    ("start: /N\\n*n/i", "n\n\nN"),
    ("start: /\\p{Lu}+\\D(?:\\.|\\/)?/", "AÉ\n."),
    ("start: ESCAPED_STRING\n%import common.ESCAPED_STRING", '"a\\"\n"'),
    (
        "start: NOTE+\nNOTE: (SH_COMMENT | SQL_COMMENT | CPP_COMMENT | C_COMMENT) LF\n%import common.LF\n"
        "%import common (SH_COMMENT, SQL_COMMENT, CPP_COMMENT, C_COMMENT)",
        '#"\n//\\\n--\t\n/*\n*"**/\n',
    ),
    ('start: a A INT\na: "x"\nA: "y"\n%import common.INT', "xy12"),
    ('start: "" | /["\\\\]|[[:alpha:]--\\n]/', '"'),
]
BYTES = LLTokenizer("byte")


def matches(lark: str, text: str) -> bool:
    return matches_grammar(serialized({"lark_grammar": lark}), text)


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize(("lark", "sample"), GRAMMARS)
def test_a_terminal_means_the_same(lark: str, sample: str, data: Any) -> None:
    """Texts are the sample with some characters replaced."""
    characters = st.sampled_from(sorted({*sample, *'aNn"\\\n\t\r;. é/*\x00\x1f\x7f'}))
    at = data.draw(st.integers(0, len(sample)))
    text = sample[:at] + data.draw(st.text(characters, max_size=2)) + sample[at + data.draw(st.integers(0, 2)) :]
    for_json, plain = (as_terminals(lark, "G", in_json=in_json) for in_json in (True, False))
    expected = matches(f"start: GR_START\n{plain}", text)
    assert matches(f'start: "<" GR_START "\\""\n{for_json}', f"<{json.dumps(text, ensure_ascii=False)[1:]}") is expected
    if matches(lark, text):  # a lexer of several terminals may miss a text where one of them goes on for too long
        assert expected


@pytest.mark.parametrize(("lark", "sample"), GRAMMARS)
def test_the_samples_match(lark: str, sample: str) -> None:
    assert matches(f"start: GR_START\n{as_terminals(lark, 'G', in_json=False)}", sample)


@pytest.mark.parametrize("lark", ['start: "a\\n"i', "start: /a\\n/i", "start: /a[\\n]/i"])
def test_letters_of_escapes_have_one_case(lark: str) -> None:
    grammar = f"start: GR_START\n{as_terminals(lark, 'G', in_json=True)}"
    assert [matches(grammar, text) for text in (r"a\n", r"A\n", r"a\N")] == [True, True, False]


@pytest.mark.parametrize(
    "lark",
    [
        'start: value\nvalue: "x" | "(" value ")"',
        'start: a\na: "x" b?\nb: "y" a',
        'start: A "b"\nA: "a"\n%ignore " "',
        "start: %json {}",
        "start: @other",
        "start: <|end|>",
        "start: A\nA: ~/a/",
        'start[capture]: "a"',
    ],
)
def test_what_is_more_than_a_terminal(lark: str) -> None:
    assert as_terminals(lark, "G", in_json=True) is None


@pytest.mark.parametrize("lark", ["start: /(?s:.)/", "start: /a b/x", 'start: "\\q"'])
def test_what_cannot_be_read_is_refused(lark: str) -> None:
    with pytest.raises(GrammarError):
        as_terminals(lark, "G", in_json=True)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.format)
class TestCalls:
    def test_the_text_of_a_call_has_its_grammar(self, family: Family) -> None:
        check_calls(family, {})

    def test_a_regular_expression_may_have_anchors(self, family: Family) -> None:
        grammar = calls_of(family, {"input": {"type": "string", TEXT_GRAMMAR: "start: /^[a-c]+$/"}})
        calls = [family.render([{"name": "patch", "arguments": {"input": text}}]).strip() for text in ("abc", "ab d")]
        assert [matches_grammar(grammar, call) for call in calls] == [True, False]

    def test_a_grammar_that_cannot_be_enforced_is_told_only(self, family: Family) -> None:
        grammar = calls_of(family, {"input": {"type": "string", TEXT_GRAMMAR: 'start: a\na: "x" | "(" a ")"'}})
        call = family.render([{"name": "patch", "arguments": {"input": "anything"}}]).strip()
        assert matches_grammar(grammar, call)

    @pytest.mark.parametrize("wrong", ["start: nobody", 5, {}])
    def test_a_wrong_grammar_is_refused(self, family: Family, wrong: Any) -> None:
        with pytest.raises(GrammarError) as caught:
            calls_of(family, {"input": {"type": "string", TEXT_GRAMMAR: wrong}})
        assert caught.value.param == "tools[0]"


@pytest.mark.parametrize("family", [f for f in FAMILIES if named_call_format(f.format).tags], ids=lambda f: f.format)
def test_the_text_of_a_tag_has_its_grammar(family: Family) -> None:
    check_calls(family, {"mode": "w"})


def check_calls(family: Family, others: dict[str, str]) -> None:
    """Check that calls with a patch and `others` are accepted just if the patch has its form."""
    schemas = {name: {"type": "string"} for name in others}
    grammar = calls_of(family, {"input": {"type": "string", TEXT_GRAMMAR: PATCH}, **schemas})
    accepted = [
        matches_grammar(grammar, family.render([{"name": "patch", "arguments": {"input": text, **others}}]).strip())
        for text in (FIX, FIX.replace("Begin", "Start"), FIX.replace("\n-", "\n\n-"))
    ]
    assert accepted == [True, False, False]


def calls_of(family: Family, properties: dict[str, Any]) -> str:
    writer = GrammarWriter({})
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    calls = CallGrammar(writer, named_call_format(family.format), [ToolSchema("patch", schema, False, "tools[0]")])
    return writer.serialized(calls.calls(parallel=False))


def matches_grammar(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = [*text.encode()]
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def test_a_template_does_not_show_grammars() -> None:
    text = {"type": "string", "description": "a patch"}
    schema = {"type": "object", "properties": {"input": {**text, TEXT_GRAMMAR: PATCH}, "other": True}}
    assert without_text_grammars(schema) == {"type": "object", "properties": {"input": text, "other": True}}
    assert without_text_grammars(shown := {"properties": {"input": text}}) is shown


def test_large_grammars_are_refused() -> None:
    with pytest.raises(GrammarError):
        GrammarWriter({}).terminals_of("start: " + " ".join(["/./"] * 300), in_json=True)
    assert lark_source("start: /./")
