"""Split a growing output into reasoning, text and tool calls.

Knows the formats of gateway/output/tools/formats.py; does not know tokens or answers. The parser of transformers finds
the regions of an output; this module trims them, and reads the calls in them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from gateway.output.piece import Piece, ToolCallDelta
from gateway.output.tools.call_format import CallFormat, ReasoningFormat
from gateway.output.tools.calls import CallPart, JsonCalls, TagCalls
from gateway.output.tools.keyword_calls import KeywordCalls

CallReader = JsonCalls | TagCalls | KeywordCalls
_REASONING, _CALLS, _MARKED_TEXT, _TEXT = "thinking", "tool_calls", "marked_content", "content"


@dataclass(frozen=True, slots=True)
class ParserSettings:
    """What all choices of one request have in common.

    `schemas` are the schemas of the tools' arguments, by the tools' names. `begins_in_reasoning` is true if the prompt
    has already opened the reasoning. `show_text` is false if a call is forced: text is then a broken call, cut by the
    limit of tokens. With `parallel` false, only the first call is kept.
    """

    template: ResponseTemplate
    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    schemas: Mapping[str, Mapping[str, Any]]
    new_id: Callable[[], str]
    begins_in_reasoning: bool = False
    show_reasoning: bool = True
    show_text: bool = True
    parallel: bool = True


class FormatParser:
    """The parser of one output in the formats of a family. The result does not depend on how the text is cut."""

    def __init__(self, settings: ParserSettings) -> None:
        self._settings = settings
        prefix = settings.reasoning.open if settings.reasoning and settings.begins_in_reasoning else ""
        self._regions = ResponseParser(settings.template, prefix=prefix)
        self._region = _REASONING if prefix else _TEXT
        self._reasoning = _Trimmed()
        self._text = _Trimmed()
        self._is_first = not prefix  # whether the text may still be all of the output, which is then shown untrimmed
        self._reader: CallReader | None = None
        self._unread: str | None = None  # the text of the current region of calls, if no call was read in it
        self._num_calls = 0
        self._ended = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token is a part of the reasoning, or ends it."""
        return self._region == _REASONING

    @property
    def ended_in_call(self) -> bool:
        """Whether the output ended within a call, whose arguments are cut."""
        return self._ended and self._reader is not None and self._reader.in_call

    def feed(self, text: str) -> Piece:
        """Add text. Return what is certain now; text that may begin a marker is held back."""
        piece = self._piece(self._regions.feed(text))
        if not self._settings.show_text:
            piece.text = ""
        return piece

    def flush(self) -> Piece:
        """Return what is still held back. Call this at the end of the output."""
        self._ended = True
        _, events = self._regions.finalize()
        piece = self._piece(events)
        if not self._num_calls:
            piece.text += self._text.rest(self._is_first)
        if not self._settings.show_text:
            piece.text = ""
        return piece

    def _piece(self, events: list[dict[str, Any]]) -> Piece:
        piece = Piece()
        for event in events:
            match event["type"]:
                case "region_open":
                    self._open(event["field"])
                case "region_chunk":
                    self._add(piece, event["text"])
                case "region_close":
                    self._close(piece)
        return piece

    def _open(self, region: str) -> None:
        self._region = region
        if region in (_REASONING, _CALLS):
            self._is_first = False
        if region == _CALLS:
            self._reader, self._unread = self._new_reader(), ""

    def _add(self, piece: Piece, text: str) -> None:
        if self._region == _CALLS and self._reader is not None:
            self._unread = None if self._unread is None else self._unread + text
            self._add_calls(piece, self._reader.feed(text))
        elif self._region == _REASONING:
            shown = self._reasoning.feed(text, strip_start=True)
            piece.reasoning += shown if self._settings.show_reasoning else ""
        else:
            piece.text += self._text.feed(text, strip_start=not self._is_first)

    def _close(self, piece: Piece) -> None:
        if self._region == _CALLS and self._reader is not None:
            self._add_calls(piece, self._reader.close(cut=self._ended))
            piece.text += self._text.feed(self._unread or "", strip_start=True)  # broken calls are shown as text
        self._region = _TEXT

    def _new_reader(self) -> CallReader:
        calls = self._settings.calls
        assert calls is not None  # without a format of calls, no region of calls begins
        if calls.tags is not None:
            return TagCalls(calls.header, calls.tags, self._settings.schemas)
        if calls.keywords is not None:
            return KeywordCalls(calls.header, calls.keywords, frozenset(self._settings.schemas))
        return JsonCalls(calls.header)

    def _add_calls(self, piece: Piece, parts: list[CallPart]) -> None:
        for part in parts:
            self._unread = None
            self._num_calls += part.name is not None
            if self._num_calls > 1 and not self._settings.parallel:
                continue
            id = self._settings.new_id() if part.name is not None else ""
            piece.tool_calls.append(ToolCallDelta(self._num_calls - 1, id, part.name or "", part.arguments))


class _Trimmed:
    """A growing text without white space at its end, and without white space at its start if the caller says so."""

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def feed(self, text: str, strip_start: bool) -> str:
        text = self._held + text
        if strip_start and not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown

    def rest(self, untrimmed: bool) -> str:
        """Return the white space at the end, at the end of the output. It is left out if there is nothing before it."""
        return self._held if self._begun or untrimmed else ""


def parser_template(calls: CallFormat | None, reasoning: ReasoningFormat | None) -> ResponseTemplate:
    """Return the regions of a family's output, in the form of transformers' parser."""
    fields: dict[str, dict[str, Any]] = {_TEXT: {"content": "text"}}
    if calls is not None:
        close = {} if calls.close is None else {"close": calls.close}
        fields[_CALLS] = {"open_pattern": calls.open or regex.escape(calls.trigger), "content": "text", **close}
    if reasoning is not None:
        fields[_REASONING] = {"open": _with_lead(reasoning, (reasoning.open,)), "close": reasoning.close}
        if reasoning.text:
            fields[_MARKED_TEXT] = {"open": _with_lead(reasoning, reasoning.text), "close": reasoning.close}
    return load_response_template({"start_anchor_pattern": r"\A", "fields": fields})


def _with_lead(reasoning: ReasoningFormat, openings: tuple[str, ...]) -> list[str]:
    """Return the literals that open a region. The lead may stand before each of them."""
    return list(dict.fromkeys(lead + opening for lead in ("", reasoning.lead) for opening in openings))
