"""One choice of an answer: turns the token events of one scheduler request into pieces, until the choice ends.

Knows token events, decoding, stop strings and parsers; does not know the answer's format.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.interface import FinishReason, TokenLogprobs
from gateway.output.parser import FormatParser
from gateway.output.piece import Piece, ReportedToken
from gateway.requests.tokens.decoder import IncrementalDecoder
from gateway.requests.tokens.stop_strings import StopMatcher
from scheduler.request import EventKind, TokenEvent


class TokenTracker:
    """The tokens of one growing output that the client may see. `offset` is the number of characters before the output.

    A token is reported when some of its text is shown. So the tokens of a stop string, and the token that ends the
    output, are not reported. With `reports_end`, tokens that show no text are reported, too, unless a stop string cut
    them off. With `reports_all`, every token is reported at once.
    """

    def __init__(self, offset: int = 0, *, reports_all: bool = False, reports_end: bool = False) -> None:
        self._num_decoded = offset
        self._num_shown = offset
        self._reports_all = reports_all
        self._reports_end = reports_end
        self._waiting: deque[ReportedToken] = deque()

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token. Its text begins where the text decoded so far ends."""
        self._waiting.append(ReportedToken(token_id, self._num_decoded, logprobs))

    def note(self, num_decoded: int, num_shown: int) -> None:
        """Record that so many more characters were decoded, and so many more are shown."""
        self._num_decoded += num_decoded
        self._num_shown += num_shown

    def pop_reportable(self, is_end: bool = False) -> list[ReportedToken]:
        """Return the tokens that can be reported now, and forget them. `is_end`: the output has ended by itself."""
        waiting, taken = self._waiting, []
        reports_all = self._reports_all or (is_end and self._reports_end)
        while waiting and (reports_all or waiting[0].text_offset < self._num_shown):
            taken.append(waiting.popleft())
        return taken


@dataclass(slots=True)
class Choice:
    """The state of one choice while it is generated.

    It is mutable, and owned by the coroutine that answers the request. `finish_reason` is the value for OpenAI's API;
    None until the choice ends.
    """

    index: int
    decoder: IncrementalDecoder | None  # None: the answer has no text
    stops: StopMatcher | None
    parser: FormatParser | None = None  # None: all of the output is text
    calls_finish: str = "tool_calls"  # the finish reason of an output with tool calls
    hides_reasoning: bool = False  # whether the tokens of the reasoning are not reported either
    tracker: TokenTracker | None = None  # None: the answer reports no tokens
    min_tokens: int = 0  # stop strings that end within so many tokens do not count
    stop_token_ids: frozenset[int] = frozenset()  # of the client, beside the model's own
    hidden_ids: frozenset[int] = frozenset()  # tokens whose text is not shown if they end the output
    first: Piece | None = None  # what the answer reports of the prompt, before the output
    only_prompt: bool = False  # whether the prompt is only scored; the token that the engine generates does not count
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    prompt_tokens: int = 0  # as they were counted here, and in the end by the model's server if it must tell
    cached_tokens: int = 0
    sum_logprobs: float = 0.0  # of the output, if the answer reports tokens
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # if requested, of each prompt token but the first
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop string or token of the client that ended the output
    has_tool_calls: bool = False  # False if the last one is cut
    vector: bytes = b""  # of a model that is no chat, as float32 in little-endian order

    def feed(self, event: TokenEvent) -> Piece:
        """Return what `event` adds to the choice.

        `event` has new tokens, or reports the regular end. The caller handles failures and cancellations.
        """
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.prompt_tokens = event.prompt_tokens or self.prompt_tokens
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        self.vector = self.vector or event.vector
        piece = self._generated(event) if self.parser is None else self._feed_parser(self.parser, event)
        if self.tracker is not None:
            piece.tokens = self.tracker.pop_reportable(self.finish_reason is not None and not self.stopped_early)
        return piece if self.first is None else self._after_first(self.first, piece)

    @property
    def stopped_early(self) -> bool:
        """Whether a stop string was found. The worker does not know this, so the request must be cancelled there."""
        return self.stops is not None and self.stops.matched

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / max(1, self.num_tokens)

    def _generated(self, event: TokenEvent) -> Piece:
        text = "" if self.only_prompt else self._decode(event)
        if event.kind is EventKind.FINISHED and self.finish_reason is None:
            text += self._end(event.finish_reason)
        return Piece(text)

    def _feed_parser(self, parser: FormatParser, event: TokenEvent) -> Piece:
        piece = Piece()
        for position in range(len(event.token_ids)):  # one at a time, so that the tokens of the reasoning are counted
            if self.finish_reason is not None:
                break
            in_reasoning = parser.in_reasoning
            self.num_reasoning_tokens += in_reasoning
            piece.extend(parser.feed(self._add_token(event, position, not (self.hides_reasoning and in_reasoning))))
        if event.kind is EventKind.FINISHED and self.finish_reason is None:
            piece.extend(parser.feed(self._end(event.finish_reason)))
        if self.finish_reason is not None:
            piece.extend(parser.flush())
        self.has_tool_calls = (self.has_tool_calls or bool(piece.tool_calls)) and not parser.ended_in_call
        if self.finish_reason == "stop" and self.has_tool_calls:
            self.finish_reason = self.calls_finish
        return piece

    def _decode(self, event: TokenEvent) -> str:
        if self.stops is None and self.tracker is None and not self.stop_token_ids and not self.hidden_ids:
            self.num_tokens += len(event.token_ids)
            return self._text_of(event.token_ids)
        text = ""
        for position in range(len(event.token_ids)):  # one at a time, so that tokens after a match are not counted
            if self.finish_reason is not None:
                break
            text += self._add_token(event, position)
        return text

    def _add_token(self, event: TokenEvent, position: int, is_reported: bool = True) -> str:
        """Add the token of `event` at `position`. Return the text that can now be shown."""
        token_id = event.token_ids[position]
        self.num_tokens += 1
        if self.tracker is not None:
            logprobs = event.logprobs[position] if event.logprobs else None
            self.sum_logprobs += logprobs.logprob if logprobs is not None else 0.0
            if is_reported:
                self.tracker.add(token_id, logprobs)
        if event.finish_reason is FinishReason.STOP and position == len(event.token_ids) - 1:
            self.stop_reason = token_id if token_id in self.stop_token_ids else None
            if token_id in self.hidden_ids:
                return ""
        return self._show(self._text_of((token_id,)))

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return "" if self.decoder is None else self.decoder.feed(token_ids)

    def _show(self, text: str) -> str:
        """Return the part of the newly decoded `text` that can be shown now, and the text held back before it."""
        shown = text
        if self.stops is not None and self.num_tokens > self.min_tokens:
            shown = self.stops.feed(text)
            if self.stops.matched:
                self.finish_reason, self.stop_reason = "stop", self.stops.found
        if self.tracker is not None:
            self.tracker.note(len(text), len(shown))
        return shown

    def _end(self, reason: FinishReason | None) -> str:
        text = self._show("" if self.decoder is None else self.decoder.flush())
        if self.stops is not None and self.finish_reason is None:
            held = self.stops.flush()
            text += held
            if self.tracker is not None:
                self.tracker.note(0, len(held))
        if self.finish_reason is None:
            is_cut = self.only_prompt or reason is FinishReason.LENGTH
            self.finish_reason = "length" if is_cut else "stop"
        return text

    def _after_first(self, first: Piece, piece: Piece) -> Piece:
        """Return what is reported of the prompt, now with its log probabilities, and `piece` after it."""
        self.first = None
        if first.tokens and self.prompt_logprobs:
            scored = zip(first.tokens[1:], self.prompt_logprobs, strict=True)
            first.tokens[1:] = [ReportedToken(t.token_id, t.text_offset, found, True) for t, found in scored]
        first.extend(piece)
        return first
