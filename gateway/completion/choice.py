"""One choice of an answer: turns the token events of one scheduler request into pieces, until the choice ends.

Knows token events, decoding, stop strings and parsers; does not know the answer's format.
"""

from dataclasses import dataclass

from engine.interface import FinishReason
from gateway.completion.stop_strings import StopMatcher
from gateway.completion.tokenizer import IncrementalDecoder
from gateway.output.piece import OutputParser, Piece
from scheduler.request import EventKind, TokenEvent


@dataclass(slots=True)
class Choice:
    """The state of one choice while it is generated.

    It is mutable, and owned by the coroutine that answers the request. `finish_reason` is the value for OpenAI's API;
    None until the choice ends.
    """

    index: int
    decoder: IncrementalDecoder
    stops: StopMatcher | None
    parser: OutputParser | None = None  # None: all of the output is text
    calls_finish: str = "tool_calls"  # the finish reason of an output with tool calls
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    has_tool_calls: bool = False

    def feed(self, event: TokenEvent) -> Piece:
        """Return what `event` adds to the choice.

        `event` has new tokens, or reports the regular end. The caller handles failures and cancellations.
        """
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        if self.parser is not None:
            return self._feed_parser(self.parser, event)
        text = self._decode(event.token_ids)
        if event.kind is EventKind.FINISHED and self.finish_reason is None:
            text += self._end(event.finish_reason)
        return Piece(text)

    @property
    def stopped_early(self) -> bool:
        """Whether a stop string was found. The worker does not know this, so the request must be cancelled there."""
        return self.stops is not None and self.stops.matched

    def _feed_parser(self, parser: OutputParser, event: TokenEvent) -> Piece:
        piece = Piece()
        for token_id in event.token_ids:  # one token at a time, so that the tokens of the reasoning can be counted
            if self.finish_reason is not None:
                break
            self.num_reasoning_tokens += parser.in_reasoning
            piece.extend(parser.feed(self._decode((token_id,))))
        if event.kind is EventKind.FINISHED and self.finish_reason is None:
            piece.extend(parser.feed(self._end(event.finish_reason)))
        if self.finish_reason is not None:
            piece.extend(parser.flush())
        self.has_tool_calls = self.has_tool_calls or bool(piece.tool_calls)
        if self.finish_reason == "stop" and self.has_tool_calls:
            self.finish_reason = self.calls_finish
        return piece

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        if self.stops is None:
            self.num_tokens += len(token_ids)
            return self.decoder.feed(token_ids)
        text = ""
        for token_id in token_ids:  # one token at a time, so that tokens after a match are not counted
            if self.finish_reason is not None:
                break
            self.num_tokens += 1
            text += self._match_stops(self.stops, self.decoder.feed((token_id,)))
        return text

    def _match_stops(self, stops: StopMatcher, text: str) -> str:
        shown = stops.feed(text)
        if stops.matched:
            self.finish_reason = "stop"
        return shown

    def _end(self, reason: FinishReason | None) -> str:
        text = self.decoder.flush()
        if self.stops is not None:
            text = self._match_stops(self.stops, text) + self.stops.flush()
        if self.finish_reason is None:
            self.finish_reason = "length" if reason is FinishReason.LENGTH else "stop"
        return text
