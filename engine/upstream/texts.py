"""Token ids for a server that takes and returns texts: the prompt's text, and the ids of the text that comes back.

The ids are ours: the server may have cut the same text into other tokens. So such a stream cannot be continued, and the
number of tokens is approximate. Knows the tokenizer of the model directory; does not know requests.
"""

from collections.abc import Sequence
from typing import Any

_ANCHOR = "a"  # before a text, so that a tokenizer that begins each text with a space does not add one


class Texts:
    """The tokenizer of a model (`backend`, of the library tokenizers)."""

    def __init__(self, backend: Any, bos_token: str = "") -> None:
        self._backend = backend
        self._bos_token = bos_token
        self._anchor_length = len(self._ids(_ANCHOR))

    def prompt(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt without the token that begins texts, which the server adds itself."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text.removeprefix(self._bos_token) if self._bos_token else text

    def plain(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens, which the server adds itself."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def ids(self, text: str) -> list[int]:
        """Return the ids of a piece of an output."""
        return self._ids(_ANCHOR + text)[self._anchor_length :] if self._joins(text) else self._ids(text)

    def _joins(self, text: str) -> bool:
        """Return whether the ids after the anchor have the text of `text`: the two were not merged into one token."""
        ids = self._ids(_ANCHOR + text)
        before: str = self._backend.decode(ids[: self._anchor_length], skip_special_tokens=False)
        whole: str = self._backend.decode(ids, skip_special_tokens=False)
        return before == _ANCHOR and whole == _ANCHOR + text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids
