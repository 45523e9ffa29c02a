"""Read tool calls whose arguments are keys and values between brackets, as in a call of Python.

Knows brackets, quotation marks, and values as JSON, Python or Gemma write them; does not know which text holds calls.
The result does not depend on how the text is cut.
"""

import ast
import json
import math
from collections.abc import Collection
from typing import Any

import regex

from gateway.output.tools.call_format import Keywords
from gateway.output.tools.calls import ArgumentCalls, CallPart, read_json

_ESCAPED = r"\\."
_JSON_NAMES = {"true": True, "false": False, "null": None}
_UNQUOTED_KEY = regex.compile(r"([{,]\s*)([\w.-]+)(\s*:)")


class KeywordCalls(ArgumentCalls):
    """A reader of calls whose arguments are keywords. A value that is neither JSON nor Python is a text."""

    def __init__(self, header: "regex.Pattern[str]", keywords: Keywords, tools: Collection[str]) -> None:
        super().__init__(header, tools)
        self._keywords = keywords
        self._quotes = tuple(filter(None, (keywords.quote, '"', "" if keywords.quote else "'")))
        self._outside = regex.compile("|".join(map(regex.escape, (*self._quotes, *"()[]{},"))))
        self._depth = 0  # open brackets in the argument
        self._quote: str | None = None  # the quotation mark of the text in which the search is

    def _next(self, name: str) -> CallPart | None:
        end = self._end_of_argument()
        if end is None:
            return None
        argument, is_last = self._text[:end], self._text[end] != ","
        self._text, self._num_searched = self._text[end + 1 :], 0
        key, assign, value = argument.partition(self._keywords.assign)
        written = self._argument(key, read_literal(value.strip(), self._keywords.quote)) if assign else ""
        return CallPart(None, written + (self._finish().arguments if is_last else ""))

    def _finish(self) -> CallPart:
        self._depth, self._quote = 0, None
        return super()._finish()

    def _end_of_argument(self) -> int | None:
        """Return the index of the comma or bracket that ends the argument; None if it is not there yet."""
        while match := self._pattern().search(self._text, self._num_searched, partial=True):
            if match.partial:
                self._num_searched = match.start()
                return None
            self._num_searched = match.end()
            if self._ends_with(match[0]):
                return int(match.start())
        return None

    def _pattern(self) -> "regex.Pattern[str]":
        if self._quote is None:
            return self._outside
        quote = regex.escape(self._quote)
        return regex.compile(quote if self._quote == self._keywords.quote else f"{_ESCAPED}|{quote}", regex.DOTALL)

    def _ends_with(self, token: str) -> bool:
        if self._quote is not None:
            self._quote = None if token == self._quote else self._quote
        elif token in self._quotes:
            self._quote = token
        elif token in ("(", "[", "{"):
            self._depth += 1
        elif self._depth == 0:
            return token in (",", self._keywords.close)
        elif token != ",":
            self._depth -= 1
        return False


def read_literal(text: str, quote: str = "") -> Any:
    """Return the value of a JSON or Python literal; `text` itself if it is neither. `quote` stands around texts."""
    if quote and quote in text:
        text = _as_json(text, quote)
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        pass
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _as_json(text: str, quote: str) -> str:
    """Return a value in the form of Gemma as JSON: keys get quotation marks, and texts get those of JSON."""
    parts = text.split(quote)
    parts[::2] = [_UNQUOTED_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(parts)


def _value(node: ast.expr) -> Any:
    """Return the value of a literal. Raises `ValueError` if it is no literal, or has no equal in JSON."""
    match node:
        case ast.Constant(str() | bool() | int() | None as value):
            return value
        case ast.Constant(float() as value) if math.isfinite(value):
            return value
        case ast.Name(id) if id in _JSON_NAMES:
            return _JSON_NAMES[id]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
    raise ValueError("no literal")
