"""The exact bytes of single tokens, for log probabilities: half a character is a token, too.

Knows vocabularies; does not know requests. `LLTokenizer` of llguidance knows these bytes, too, but takes three seconds
for a vocabulary of 150,000 tokens, in which no other thread of the gateway runs. Here, nothing is computed in advance.
"""

import re
from typing import Any

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# The byte that each character of a byte-level vocabulary stands for (`bytes_to_unicode` of GPT-2).
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
_SPACE = "▁"  # stands for a space in vocabularies of SentencePiece
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # one byte, in vocabularies of SentencePiece


class TokenTexts:
    """The bytes and texts of the tokens of one tokenizer (`backend`, of the library tokenizers)."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        decoder = str(backend.decoder)
        self._is_byte_level = "ByteLevel" in decoder
        self._is_sentencepiece = not self._is_byte_level and _SPACE in decoder
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; no bytes for an id that the tokenizer does not have."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute(token_id)
        return found

    def _compute(self, token_id: int) -> bytes:
        added: str | None = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)
        if not self._is_sentencepiece:
            text: str = self._backend.decode([token_id], skip_special_tokens=False)
            return text.encode()
        byte = _FALLBACK.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def shown(token: bytes, prefix: str = "") -> str:
    """Return the bytes of a token as text. Bytes that are not UTF-8 are escaped, as in OpenAI's answers.

    Then the text begins with `prefix`: `bytes:` in the answers of /v1/completions.
    """
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)
