"""From the tokens of one growing output to its text."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

MAX_PENDING = 16  # maximum tokens held back; no character has so many bytes, so the bytes of more are not UTF-8
NO_TOKENS: Mapping[int, str] = {}


class IncrementalDecoder:
    """A decoder for one growing output. An incomplete character is held back until its last token arrives.

    `DecodeStream` does the decoding, but on its own it would never release bytes that are not UTF-8. This class returns
    such bytes as U+FFFD after `MAX_PENDING` tokens, or in `flush`. Special tokens are left out, except for those of
    `shown`.
    """

    def __init__(self, backend: Any, shown: Mapping[int, str] = NO_TOKENS, skip_special_tokens: bool = True) -> None:
        self._backend = backend
        self._shown = shown
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add `token_ids`. Return the text that is complete now: often one word, sometimes an empty string."""
        return "".join([self._step(token_id) for token_id in token_ids])

    def _step(self, token_id: int) -> str:
        if token_id in self._shown:
            return self.flush() + self._shown[token_id]
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception:  # the only error type of the binding; the new token does not continue the held bytes
            return self.flush()
        if text is not None:
            self._pending.clear()
            return text
        return self.flush() if len(self._pending) > MAX_PENDING else ""

    def flush(self) -> str:
        """Return the text of the tokens held back, even if it is incomplete, and forget these tokens."""
        pending, self._pending = self._pending, []
        if not pending:
            return ""
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        text: str = self._backend.decode(pending, skip_special_tokens=self._skip_special_tokens)
        return text
