"""One choice of an answer: the tokens of one request turning into text, up to its end.

Knows token events, decoding and stop strings; knows neither the shape of the answer nor how it travels.
"""

from dataclasses import dataclass

from engine.interface import FinishReason
from gateway.completion.stop_strings import StopMatcher
from gateway.completion.tokenizer import IncrementalDecoder
from scheduler.request import EventKind, TokenEvent


@dataclass(slots=True)
class Choice:
    """Mutable; owned by the coroutine that answers the request. `finish_reason` is OpenAI's word, once ended."""

    index: int
    request_id: str
    decoder: IncrementalDecoder
    stops: StopMatcher | None
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None

    def feed(self, event: TokenEvent) -> str:
        """The text that `event` adds to what may be shown. The event must not be a failure."""
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        text = self._decode(event.token_ids)
        if event.kind is EventKind.FINISHED and self.finish_reason is None:
            text += self._end(event.finish_reason)
        return text

    @property
    def stopped_early(self) -> bool:
        """A stop string matched: the worker does not know yet that nothing more is wanted."""
        return self.stops is not None and self.stops.matched

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        if self.stops is None:
            self.num_tokens += len(token_ids)
            return self.decoder.feed(token_ids)
        text = ""
        for token_id in token_ids:  # one by one: tokens after the match are neither shown nor counted
            if self.finish_reason is not None:
                break
            self.num_tokens += 1
            text += self._past_stops(self.stops, self.decoder.feed((token_id,)))
        return text

    def _past_stops(self, stops: StopMatcher, text: str) -> str:
        shown = stops.feed(text)
        if stops.matched:
            self.finish_reason = "stop"
        return shown

    def _end(self, reason: FinishReason | None) -> str:
        text = self.decoder.flush()
        if self.stops is not None:
            text = self._past_stops(self.stops, text) + self.stops.flush()
        if self.finish_reason is None:
            self.finish_reason = "length" if reason is FinishReason.LENGTH else "stop"
        return text
