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


class NothingLeft(Exception):
    """So few tokens have no room for any of the text, beside the special tokens and the first text of a pair."""


async def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    max_tokens: int,
    cut_to: int | None = None,
    run: RunInThread = in_thread,
) -> list[EncodedText]:
    """Return the tokens of each text or pair, which are all texts or all pairs.

    With `cut_to`, the end of a longer text, or that of the second one of a pair, is left out, so that so many tokens
    remain; the special tokens at the end stay. `run` is used for all but short texts. Raises `NothingLeft`; without
    `cut_to`, `TextTooLong` with the index of a text that certainly has more than `max_tokens`.
    """
    if cut_to is None:
        _check_lengths(tokenizer, texts, max_tokens)

    def encode() -> list[EncodedText]:
        return [_encode(tokenizer, _parts(text), cut_to) for text in texts]

    size = time_of([part for text in texts for part in _parts(text)])
    return encode() if size <= INLINE_CHARS else await run(encode, is_long=size > LONG_CHARS)


def _parts(text: str | tuple[str, str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def _check_lengths(tokenizer: Tokenizer, texts: Sequence[str | tuple[str, str]], max_tokens: int) -> None:
    for index, text in enumerate(texts):
        try:
            tokenizer.check_length(sum(map(len, _parts(text))), max_tokens)
        except TextTooLong:
            raise TextTooLong(index) from None


def _encode(tokenizer: Tokenizer, parts: tuple[str, ...], cut_to: int | None) -> EncodedText:
    if cut_to is not None:
        parts = tuple(tokenizer.cut(part, cut_to, keeps_first=True) for part in parts)
    # As a batch of one, because the backend's `encode` would hold the GIL during the whole call.
    [encoding] = tokenizer.backend.encode_batch_fast([parts if len(parts) > 1 else parts[0]])
    ids, last_from = encoding.ids, _last_from(encoding, len(parts) > 1)
    if cut_to is not None and len(ids) > cut_to:
        num_special = _num_special(encoding.sequence_ids)
        if cut_to - num_special <= last_from:
            raise NothingLeft
        ids = ids[: cut_to - num_special] + ids[len(ids) - num_special :]
    return EncodedText(tuple(ids), last_from if len(parts) > 1 else 0)


def _last_from(encoding: Any, is_pair: bool) -> int:
    """Return where the text, or the second text of a pair, begins. An empty second one begins at its special tokens."""
    tokens = enumerate(zip(encoding.sequence_ids, encoding.type_ids, strict=True))
    if is_pair:
        found = (i for i, (origin, type_id) in tokens if origin == 1 or type_id == 1)
    else:
        found = (i for i, (origin, _) in tokens if origin == 0)
    return next(found, len(encoding.ids))


def _num_special(origins: Sequence[Any]) -> int:
    """Return how many special tokens follow the last text."""
    return next((i for i, origin in enumerate(reversed(origins)) if origin is not None), len(origins))
