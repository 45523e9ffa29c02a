"""Texts and pairs of texts as an encoder reads them: with the special tokens at their ends and between them.

Knows the tokenizer; does not know requests or models.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gateway.requests.tokens.tokenizer import (
    INLINE_CHARS,
    LONG_CHARS,
    RunInThread,
    TextTooLong,
    Tokenizer,
    in_thread,
    time_of,
)


class EncodedText(NamedTuple):
    """The tokens of a text, or of a pair whose second text begins at `second_from` (0: it is no pair)."""

    token_ids: tuple[int, ...]
    second_from: int = 0


async def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    max_tokens: int,
    cut_to: int | None = None,
    run: RunInThread = in_thread,
) -> list[EncodedText]:
    """Return the tokens of each text or pair, which are all texts or all pairs.

    With `cut_to`, the end of a longer text, or that of the second one of a pair, is left out, so that so many tokens
    remain; the special tokens at the end stay. Otherwise, `TextTooLong` is raised for a text that certainly has more
    than `max_tokens`. `run` is used for all but short texts.
    """

    def encode() -> list[EncodedText]:
        return [_encode(tokenizer, text, max_tokens, cut_to) for text in texts]

    size = time_of([part for text in texts for part in _parts(text)])
    return encode() if size <= INLINE_CHARS else await run(encode, is_long=size > LONG_CHARS)


def _parts(text: str | tuple[str, str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def _encode(tokenizer: Tokenizer, text: str | tuple[str, str], max_tokens: int, cut_to: int | None) -> EncodedText:
    parts = _parts(text)
    if cut_to is None:
        tokenizer.check_length(sum(map(len, parts)), max_tokens)
    else:
        parts = tuple(tokenizer.cut(part, cut_to, keeps_first=True) for part in parts)
    # As a batch of one, because the backend's `encode` would hold the GIL during the whole call.
    [encoding] = tokenizer.backend.encode_batch_fast([parts if len(parts) > 1 else parts[0]])
    origins, ids = encoding.sequence_ids, encoding.ids
    second_from = 0 if len(parts) == 1 else next((i for i, origin in enumerate(origins) if origin == 1), len(ids))
    if cut_to is not None and len(ids) > cut_to:
        num_last = _num_special(origins)
        if cut_to - num_last <= second_from:  # nothing of the last text would be left
            raise TextTooLong
        ids = ids[: cut_to - num_last] + ids[len(ids) - num_last :]
    return EncodedText(tuple(ids), second_from)


def _num_special(origins: Sequence[Any]) -> int:
    """Return how many special tokens follow the last text."""
    return next((i for i, origin in enumerate(reversed(origins)) if origin is not None), len(origins))
