"""Let an output under a grammar end within its limit of tokens: near the limit, only tokens that leave time to end.

A model may never close a string that it has opened. So when few tokens are left, each token that the grammar allows is
tried: it stays allowed if a way to the end is known from there that fits. A way to the end closes what is open, leaves
out what is optional, and takes the first value that the grammar allows. It need not be the shortest, but once there is
one that fits, each token leaves one that fits. Knows llguidance; does not know sequences or logits.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

# Token ids of the bytes that lead to the end of a JSON value, outside of strings and in them; then those of all others.
# Both serve patterns, too: those of e-mail addresses end after a dot and two letters.
_OUTSIDE = b'}],0"n-@t.abf[{:123456789'
_IN_STRING = b"0@n.123456789abcdefghijklmopqrstuvwxyz"
_MAX_TRIED = 48  # allowed tokens that are tried in one step, at some 0.1 ms each; of more, one of each kind
_RECENT = 16  # tokens of a way that are not repeated in a pattern if others are allowed
_MAX_COMPARED = 8  # alternatives of a value whose lengths are compared
_TEXT = re.compile(rb'[^\x00-\x20"\\{}\[\],:0-9+.-]+')
_NUMBER = re.compile(rb"[0-9]+")
# Within how many tokens of the limit a way to the end is sought: at least so many, and one more for so many characters
# of the grammar. What it demands is shorter than its text.
_MIN_HORIZON, _CHARACTERS_A_TOKEN = 64, 4
# By which share of that one token may lengthen the way. While more is left, nothing is tried.
_REACH = 1 / 2

Row = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]


def horizon(grammar: str) -> int:
    """Return within how many tokens an output of the serialised `grammar` can be ended, estimated from its length."""
    return _MIN_HORIZON + len(grammar) // _CHARACTERS_A_TOKEN


class Closer:
    """The ways to the end of grammars, in the tokens of one vocabulary."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        singles = {byte: ids[0] for byte in range(256) if len(ids := tokenizer.tokenize_bytes(bytes([byte]))) == 1}
        self._brackets, self._closing, self._opening, self._quote, self._letters = (
            [singles[byte] for byte in text if byte in singles] for text in (b"}]", b"}],", b"{[", b'"', b"abxz")
        )
        self._outside = np.array([singles[byte] for byte in (*_OUTSIDE, *singles) if byte in singles], np.int64)
        self._in_string = np.array([singles[byte] for byte in (*_IN_STRING, *singles) if byte in singles], np.int64)
        texts = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
        self._kinds = _numbered_kinds(texts)
        self._by_kind = np.lexsort((np.array([len(text) for text in texts]), self._kinds))  # in each kind by length

    def narrow(self, state: LLMatcher, row: Row, way: list[int], num_left: int) -> None:
        """Clear the bits of `row`, the mask of the next token, after which the output cannot end in `num_left` tokens.

        `way` leads to the end from `state`. The end-of-sequence token counts, but if only the text before it fits, then
        that is kept.
        """
        bits = np.zeros(32 * len(row), np.uint8)
        if len(way) < num_left:
            bits[self._kept(state, self._by_kind[_flags(row)[self._by_kind] == 1], way, num_left - 1)] = 1
        bits[way[0]] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def _kept(self, state: LLMatcher, allowed: Ids, way: list[int], num_left: int) -> Ids:
        """Return those of the `allowed` tokens, sorted by kind, after which the output can end in `num_left` tokens.

        `way` leads to the end now. Of many tokens, the kinds with the shortest texts are tried: what longer ones say
        can be said with shorter ones. All of a kind are kept if its longest token is, otherwise only the shortest.
        """

        def fits(token_id: int) -> bool:
            after = state.deep_copy()
            is_end = token_id in self._tokenizer.eos_tokens
            return is_end or (after.consume_token(token_id) and self.way(after, num_left, way) is not None)

        if len(allowed) <= _MAX_TRIED:
            return np.array([token_id for token_id in allowed.tolist() if fits(token_id)], np.int64)
        kinds = np.split(allowed, np.flatnonzero(np.diff(self._kinds[allowed])) + 1)[:_MAX_TRIED]
        return np.concatenate([k if fits(int(k[-1])) else k[: int(fits(int(k[0])))] for k in kinds])

    def way(self, state: LLMatcher, limit: int, known: list[int]) -> list[int] | None:
        """Return at most `limit` tokens that lead to the end, the end-of-sequence token too; None if none are known.

        Advances `state`. `known` is a way from another state; if a part of it up to its end is allowed somewhere on
        this way, it ends with that part.
        """
        way: list[int] = []
        while len(way) < limit:
            if state.is_accepting():
                return [*way, self._tokenizer.eos_token]
            parts = (known[i:] for i in reversed(range(len(known))))
            part = next((part for part in parts if state.validate_tokens(part) == len(part)), None)
            if part is not None:
                return [*way, *part] if len(way) + len(part) <= limit else None
            tokens = state.compute_ff_tokens() or self._next(state, way)
            if not tokens or not state.consume_tokens(tokens):
                return None
            way += tokens
        return None

    def _next(self, state: LLMatcher, way: list[int]) -> list[int]:
        """Return the token of one byte that leads nearest to the end; an empty list if none is allowed.

        Both brackets are allowed only in a string, and letters that begin no value only there or in a pattern; both end
        with a quote. Elsewhere, the shorter of a few texts is taken, such as those of an `enum`, and a bracket is
        opened only if nothing else is allowed: a recursive schema would never end. In a pattern, the tokens that stand
        last in the `way` come last, since one such as that of an e-mail address lets them be repeated. A quote ends it.
        """
        in_string = len(self._brackets) == 2 and all(state.validate_tokens([bracket]) for bracket in self._brackets)
        if in_string and state.validate_tokens(self._quote):
            return self._quote
        order = self._in_string if in_string else self._outside
        allowed = order[_flags(np.frombuffer(state.compute_bitmask(), np.int32))[order] == 1].tolist()
        in_pattern = in_string or not set(self._letters).isdisjoint(allowed)
        if in_pattern and not set(self._quote).isdisjoint(allowed):
            return self._quote
        if not allowed or (allowed[0] in self._closing and not in_pattern):
            return allowed[:1]  # type: ignore[no-any-return]
        recent, compared = way[-_RECENT:], len(allowed) <= _MAX_COMPARED

        def cost(token_id: int) -> tuple[bool, int, int]:
            num_forced = self._num_forced(state, token_id) if compared else 0
            repeats = (in_pattern or not compared) and token_id not in self._quote
            return token_id in self._opening, recent.count(token_id) if repeats else 0, num_forced

        return [min(allowed, key=cost)]

    def _num_forced(self, state: LLMatcher, token_id: int) -> int:
        after = state.deep_copy()
        after.consume_token(token_id)
        return len(after.compute_ff_tokens())


class Ending:
    """The way to the end of one output, sought within its horizon. It depends only on the tokens of the output."""

    __slots__ = ("_closer", "_horizon", "_limit", "_way")

    def __init__(self, closer: Closer, limit: int, horizon: int) -> None:
        self._closer = closer
        self._limit = limit  # the greatest number of output tokens
        self._horizon = horizon
        self._way: list[int] | None = None

    def num_before(self, num_consumed: int) -> int:
        """Return how many tokens may follow before a way to the end is sought."""
        return max(0, self._limit - self._horizon - num_consumed)

    def follow(self, state: LLMatcher, num_consumed: int, token_id: int | None = None) -> None:
        """Note that `token_id` has led to `state`. If `num_consumed` tokens are within the horizon, seek a way."""
        num_left, known = self._limit - num_consumed, self._way or []
        if known[1:] and known[0] == token_id:
            self._way = known[1:]
        elif 0 < num_left <= self._horizon:
            self._way = self._closer.way(state.deep_copy(), num_left + 1, known)

    def narrow(self, state: LLMatcher, num_consumed: int, row: Row) -> None:
        """Leave in `row`, the mask of the next token, what still lets the output end; all if no way to the end fits."""
        num_left = self._limit - num_consumed
        if self._way is not None and num_left < len(self._way) + int(self._horizon * _REACH):
            self._closer.narrow(state, row, self._way, num_left)


def _flags(row: Row) -> npt.NDArray[np.uint8]:
    """Return 0 or 1 for each token of a mask."""
    return np.unpackbits(row.view(np.uint8), bitorder="little")


def _numbered_kinds(texts: Sequence[bytes]) -> Ids:
    """Return a number for each token: equal for tokens that differ only in the letters and digits of their text.

    Kinds are numbered by their shortest texts. Tokens that end in half a character are of one kind if as many bytes are
    missing.
    """
    kinds = [_kind(text) for text in texts]
    shortest: dict[bytes, int] = {}
    for kind, text in zip(kinds, texts, strict=True):
        shortest[kind] = min(len(text), shortest.get(kind, len(text)))
    numbers = {kind: number for number, kind in enumerate(sorted(shortest, key=shortest.__getitem__))}
    return np.array([numbers[kind] for kind in kinds])


def _kind(text: bytes) -> bytes:
    for num_missing in range(4):
        try:
            (text + b"\x80" * num_missing).decode()
        except UnicodeDecodeError:
            continue
        return _NUMBER.sub(b"0", _TEXT.sub(b"a", text)) + b"?" * num_missing
    return text
