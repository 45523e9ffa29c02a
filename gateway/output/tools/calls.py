"""Read the tool calls in a growing text, in the form in which a model family writes them.

Knows headers with names, arguments in JSON, and arguments in tags; does not know which text holds calls (the parser
does), and no answer format. The result does not depend on how the text is cut.

`feed` of a reader adds text, and returns the parts of calls that are certain now. `close` returns the rest, at the end
of the text that holds calls; `cut` is true if the output ended within it.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from gateway.output.tools.call_format import Tags

_IN_STRING = regex.compile(r'["\\]')
_OUTSIDE = regex.compile(r'["{}\[\]]')
_KEYS_OF_NAMES = ("name", "tool_name")
_KEYS_OF_ARGUMENTS = ("arguments", "parameters", "args")


@dataclass(frozen=True, slots=True)
class CallPart:
    """The beginning of a call, if it has a `name`, or more of the arguments of the current call."""

    name: str | None
    arguments: str = ""


class JsonValueEnd:
    """A search for the end of one JSON object or array in a growing text."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the next character is escaped

    def find(self, text: str) -> int | None:
        """Return the index in `text` that follows the value; None if the value does not end in `text`."""
        at: int = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            match = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                return None
            at = match.end()
            if self._ends_with(match[0]):
                return at
        return None

    def _ends_with(self, char: str) -> bool:
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if char in "{[" else -1
            return self._depth <= 0
        return False


class JsonCalls:
    """A reader of calls that are a header with the name, and then a JSON object of arguments.

    Text between a call and the next header is skipped. If the text has no header at all, it may be JSON with its keys
    in another order, which is read at the end.
    """

    def __init__(self, header: "regex.Pattern[str]") -> None:
        self._header = header
        self._text = ""
        self._value: JsonValueEnd | None = None  # of the arguments that are being read
        self._has_calls = False

    def feed(self, text: str) -> list[CallPart]:
        self._text += text
        parts: list[CallPart] = []
        while self._text:
            if self._value is not None:
                parts.append(CallPart(None, self._read_arguments(self._value)))
                continue
            header = self._header.search(self._text, partial=True)
            if header is None or header.partial:
                break
            parts.append(CallPart(_name(header["name"])))
            self._text, self._value, self._has_calls = self._text[header.end() :], JsonValueEnd(), True
        return parts

    def close(self, *, cut: bool) -> list[CallPart]:
        return [] if self._has_calls else _read_whole(self._text)

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and has not ended."""
        return self._value is not None

    def _read_arguments(self, value: JsonValueEnd) -> str:
        end = value.find(self._text)
        arguments = self._text if end is None else self._text[:end]
        self._text = self._text[len(arguments) :]
        self._value = value if end is None else None
        return arguments


class ArgumentCalls(ABC):
    """A reader of calls that are a header with the name of a tool, and then arguments, each with a key and a value.

    Text between a call and the next header is skipped, and so are headers of tools that are not in `tools` (None: any
    tool). Each argument is returned when it is complete.
    """

    def __init__(self, header: "regex.Pattern[str]", tools: Collection[str] | None = None) -> None:
        self._header = header
        self._tools = tools
        self._text = ""
        self._num_searched = 0  # characters of the text in which no argument ends
        self._name: str | None = None  # of the call that is being read
        self._separator = "{"

    def feed(self, text: str) -> list[CallPart]:
        self._text += text
        parts: list[CallPart] = []
        while (part := self._begin() if self._name is None else self._next(self._name)) is not None:
            parts.append(part)
        return parts

    def close(self, *, cut: bool) -> list[CallPart]:
        if cut:
            return []
        begin = self.feed("\n") if self._name is None else []  # a name at the very end is complete now
        return begin if self._name is None else [*begin, self._finish()]

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and has not ended."""
        return self._name is not None

    @abstractmethod
    def _next(self, name: str) -> CallPart | None:
        """Return the next argument of the tool `name`, or the end of the call; None if it is not there yet."""

    def _begin(self) -> CallPart | None:
        """Return the beginning of the next call; None if it is not there yet."""
        at = 0
        while (header := self._header.search(self._text, at, partial=True)) is not None and not header.partial:
            if self._tools is None or header["name"] in self._tools:
                self._text, self._num_searched, self._name = self._text[header.end() :], 0, header["name"].strip()
                return CallPart(self._name)
            at = header.end()
        self._text = self._text[at:]
        return None

    def _argument(self, key: str, value: Any) -> str:
        separator, self._separator = self._separator, ", "
        return f"{separator}{json.dumps(key.strip())}: {json.dumps(value, ensure_ascii=False)}"

    def _finish(self) -> CallPart:
        rest = "{}" if self._separator == "{" else "}"
        self._name, self._separator = None, "{"
        return CallPart(None, rest)


class TagCalls(ArgumentCalls):
    """A reader of calls with tags as arguments. A value is a text if its schema says so, or if it is not JSON."""

    def __init__(self, header: "regex.Pattern[str]", tags: Tags, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(header)
        self._tags = tags
        self._schemas = schemas

    def _next(self, name: str) -> CallPart | None:
        return self._next_argument(name) or self._end()

    def _next_argument(self, name: str) -> CallPart | None:
        tags = self._tags
        end = self._text.find(tags.close, self._num_searched)
        argument = tags.argument.match(self._text) if end >= 0 else None
        if argument is None:
            self._num_searched = max(0, len(self._text) - len(tags.close))
            return None
        self._text, self._num_searched = self._text[argument.end() :], 0
        key = argument["key"].strip()
        return CallPart(None, self._argument(key, _typed(argument["value"], _property(self._schemas.get(name), key))))

    def _end(self) -> CallPart | None:
        footer = self._tags.footer.match(self._text)
        if footer is None:
            return None
        self._text, self._num_searched = self._text[footer.end() :], 0
        return self._finish()


def _name(text: str) -> str:
    """Return the name in a header, which is a JSON string or plain."""
    text = text.strip()
    try:
        return str(json.loads(text)) if text.startswith('"') else text
    except ValueError:
        return text.strip('"')


def _read_whole(text: str) -> list[CallPart]:
    """Return the calls of a text that is one JSON object or an array of objects; none if it is neither."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    parts: list[CallPart] = []
    for item in value if isinstance(value, list) else [value]:
        call = item.get("function", item) if isinstance(item, dict) else None
        name = _first(call, _KEYS_OF_NAMES) if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(call, dict):
            return []
        arguments = _first(call, _KEYS_OF_ARGUMENTS) or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts += [CallPart(name), CallPart(None, text)]
    return parts


def _first(call: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((call[key] for key in keys if key in call), None)


def _property(schema: Mapping[str, Any] | None, key: str) -> Any:
    properties = (schema or {}).get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def _typed(text: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return text


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if it is none, or has numbers that JSON cannot write."""
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number
