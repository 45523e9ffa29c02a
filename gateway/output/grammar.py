"""Write and check grammars for llguidance, in its variant of Lark's syntax.

Knows llguidance; does not know tools, reasoning or requests. A grammar is checked against a tokenizer of single bytes,
up to its first mask of tokens: this finds what cannot be compiled, what is too large, and what no output can satisfy.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import regex

from gateway.output.json_schema import GrammarError, check_size, closed, enforceable
from gateway.output.text_grammar import as_terminals

if TYPE_CHECKING:
    from llguidance import LLTokenizer  # imported by the first grammar, because most gateways have none

# JSON without free white space: weak models would never end it. One space may follow each comma and colon.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
MAX_GRAMMAR_LENGTH = 2**16  # characters; more could take longer than 100 ms to compile, and workers compile it, too
MAX_GRAMMAR_LINES = 1000  # llguidance follows rules recursively: thousands of them would overflow the stack
# Characters of a grammar with JSON schemas in it: llguidance follows the references of schemas recursively, too.
_MAX_LENGTH_WITH_SCHEMAS = 2**12
_MAX_REASON_LENGTH = 300  # characters of llguidance's error messages
# What llguidance's messages with these beginnings mean to the user.
_SAID = {
    "NoExtension": "no output can match it",
    "oneOf constraints are not": "it has a oneOf whose schemas may overlap; use anyOf",
}
_MAX_CHECKED = 256  # results kept (LRU): bulk traffic repeats the same few grammars

Source = Mapping[str, Any]  # one grammar as llguidance reads it: `{"lark_grammar": …}` or `{"json_schema": …}`


class GrammarWriter:
    """A grammar in Lark's syntax that refers to other grammars.

    `special_ids` are the ids of the special tokens by their texts. Grammars must name such tokens, because quoted text
    matches only ordinary tokens.
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._special = regex.compile("|".join(map(regex.escape, longest_first)) or "(?!)")
        self._rules: list[str] = []
        self._sources: list[Source] = []

    def literal(self, text: str) -> str:
        """Return an expression for exactly `text`, in which special tokens are written as such."""
        return " ".join(self._terms(text)) or '""'

    def until(self, end: str, text: str = "") -> str:
        """Return an expression for a text that ends with the first `end`. `text` is a terminal; empty: any text."""
        first, *rest = self._terms(end)
        if first.startswith("<["):
            return " ".join([text or "TEXT", first, *rest])
        return " ".join([self.rule(text or r"/(.|\n)*/", f"suffix={first}"), *rest])

    def terminals_of(self, lark: str, *, in_json: bool = False) -> str:
        """Add another grammar of texts. Return a terminal for it; empty if it is more than a terminal can be.

        With `in_json`, the terminal matches the texts as they stand between the quotation marks of a JSON string.
        Raises `GrammarError` if the grammar cannot be used.
        """
        checked(lark_source(lark))
        prefix = f"G{len(self._rules)}"
        terminals, start = as_terminals(lark, prefix, in_json=in_json), f"{prefix}R_START"
        if terminals is None:
            return ""
        checked(lark_source(f"start: {start}\n{terminals}"))
        self._rules.append(terminals)
        return start

    def rule(self, expression: str, options: str = "") -> str:
        """Add a rule. Return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[{options}]: {expression}" if options else f"{name}: {expression}")
        return name

    def source(self, source: Source) -> str:
        """Add another grammar. Return an expression for it."""
        name = f"g{len(self._sources)}"
        self._sources.append({"name": name, **source})
        return f"@{name}"

    def serialized(self, start: str) -> str:
        """Return the whole grammar, which begins with the expression `start`."""
        lark = "\n".join([f"start: {start}", r"TEXT: /(.|\n)*/", *self._rules])
        return json.dumps({"grammars": [{"name": "output", "lark_grammar": lark}, *self._sources]})

    def _terms(self, text: str) -> list[str]:
        terms, at = [], 0
        for match in self._special.finditer(text):
            terms += [json.dumps(text[at : match.start()])] if match.start() > at else []
            terms.append(f"<[{self._special_ids[match[0]]}]>")
            at = match.end()
        return [*terms, json.dumps(text[at:])] if text[at:] else terms


def json_source(schema: Mapping[str, Any], *, lenient: bool, whitespace_pattern: str | None = None) -> Source:
    """Return a grammar of the JSON values that match `schema`. Raises `GrammarError` if the schema is too large.

    If `lenient` is true, what llguidance does not know of JSON schema is ignored, and `oneOf` is taken as `anyOf`.
    `whitespace_pattern` is a regular expression for the white space between the tokens of JSON.
    """
    check_size(schema)
    schema = enforceable(closed(schema)) if lenient else closed(schema)
    style = _JSON_STYLE if whitespace_pattern is None else {"whitespace_pattern": whitespace_pattern}
    return {"json_schema": {**schema, "x-guidance": {**style, "lenient": lenient, "coerce_one_of": lenient}}}


def lark_source(text: str) -> Source:
    """Return a grammar in Lark's syntax. Raises `GrammarError` if it is too large."""
    if (num_lines := len(text.splitlines())) > MAX_GRAMMAR_LINES:
        raise GrammarError(f"it has {num_lines} lines, {MAX_GRAMMAR_LINES} at most")
    if "%json" in text and len(text) > _MAX_LENGTH_WITH_SCHEMAS:
        raise GrammarError(f"with %json, it may have {_MAX_LENGTH_WITH_SCHEMAS} characters at most")
    return {"lark_grammar": text}


def serialized(source: Source) -> str:
    """Return `source` as a whole grammar for the engine."""
    return json.dumps({"grammars": [{"name": "output", **source}]})


def checked(source: Source) -> Source:
    """Return `source` if it can be used. Raises `GrammarError` if not.

    This takes up to about 100 ms for large grammars, without the GIL for most of it.
    """
    reason = _fault(serialized(source))
    if reason is not None:
        raise GrammarError(reason)
    return source


@lru_cache(_MAX_CHECKED)
def _fault(grammar: str) -> str | None:
    """Return why `grammar` cannot be used; None if it can."""
    if len(grammar) > MAX_GRAMMAR_LENGTH:
        return f"it has {len(grammar)} characters, {MAX_GRAMMAR_LENGTH} at most"
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return None
    reason = _reason(matcher.get_error().strip().split("\n"))[:_MAX_REASON_LENGTH]
    return next((said for begin, said in _SAID.items() if reason.startswith(begin)), reason)


def _reason(lines: list[str]) -> str:
    """Return what the first line of an error says. Of a regular expression, a later line says what is wrong with it."""
    faults = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return f"{lines[0]} {faults[0]}: {lines[1].strip()}" if faults else lines[0]


@lru_cache(1)
def _byte_tokenizer() -> "LLTokenizer":
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
