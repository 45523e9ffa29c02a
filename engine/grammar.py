"""Compile grammars, and compute which tokens a grammar allows next.

Knows llguidance, the model's tokenizer and the state of a sequence in its grammar; does not know steps, logits or
sampling. Compiling takes up to about 100 ms, without the GIL for nearly all of it, so it is done on another thread
before a sequence is started; a step only reads compiled grammars.
"""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
from huggingface_hub import hf_hub_download
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from engine.closing import Closer, Ending, horizon
from engine.interface import GRAMMAR_FAILED, EngineInfo, GrammarError

_MAX_COMPILED = 64  # compiled grammars kept (LRU): bulk traffic repeats the same few grammars
_MAX_REASON_LENGTH = 300  # characters of llguidance's error messages

Bits = npt.NDArray[np.int32]


class Matcher:
    """The state of a sequence's grammar after the first `num_consumed` tokens of its output."""

    __slots__ = ("ending", "inner", "num_consumed")

    def __init__(self, inner: LLMatcher, ending: Ending | None = None) -> None:
        self.inner = inner
        self.ending = ending  # None: the output need not end within its limit
        self.num_consumed = 0
        if ending is not None:
            ending.follow(inner, 0)

    def consume(self, output_token_ids: Iterable[int]) -> None:
        """Advance the state by the next output tokens. Raises `GrammarError` if the grammar does not allow them."""
        token_ids = list(output_token_ids)
        if self.ending is None:
            self._consume(token_ids)
            return
        num_before = self.ending.num_before(self.num_consumed)
        self._consume(token_ids[:num_before])
        for token_id in token_ids[num_before:]:
            self._consume([token_id])
            self.ending.follow(self.inner, self.num_consumed, token_id)

    def _consume(self, token_ids: list[int]) -> None:
        self.inner.consume_tokens(token_ids)
        if self.failure is not None:
            raise GrammarError(self.failure)
        self.num_consumed += len(token_ids)

    def narrow(self, row: npt.NDArray[np.int32]) -> None:
        """Near the limit of the output, leave in `row`, the mask of the next token, what still lets it end."""
        if self.ending is not None and self.failure is None:
            self.ending.narrow(self.inner, self.num_consumed, row)

    @property
    def failure(self) -> str | None:
        """The reason why the grammar has failed, as text for the user; None if it has not failed."""
        return f"{GRAMMAR_FAILED} cannot be followed: {_reason(self.inner)}" if self.inner.is_error() else None


class CompiledGrammar:
    """A compiled grammar. Any number of sequences may follow it."""

    __slots__ = ("_closer", "_horizon", "_inner")

    def __init__(self, inner: LLMatcher, closer: Closer, horizon: int) -> None:
        self._inner = inner
        self._closer = closer
        self._horizon = horizon

    def matcher(self, limit: int | None = None) -> Matcher:
        """Return a matcher at the beginning of the grammar, for an output that should end within `limit` tokens."""
        ending = None if limit is None else Ending(self._closer, limit, self._horizon)
        return Matcher(self._inner.deep_copy(), ending)


class Grammars:
    """The compiler for the grammars of one model, and their masks. Several threads may use it at the same time."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._compile = lru_cache(_MAX_COMPILED)(self._compile_uncached)
        self._lock = Lock()  # compiles one grammar at a time, and no grammar twice
        self._vocabulary: LLTokenizer | GrammarError | None = None
        self._executor: LLExecutor | None = None
        self._closer: Closer | None = None

    def load(self) -> None:
        """Read the tokenizer now instead of with the first grammar.

        Reading holds the GIL, and takes over a second for a vocabulary of 150,000 tokens. If the tokenizer cannot be
        read, each grammar is refused with the reason.
        """
        with self._lock:
            self._vocabulary = self._vocabulary or self._read_tokenizer()
            if self._closer is None and isinstance(self._vocabulary, LLTokenizer):
                self._closer = Closer(self._vocabulary)

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar, or return it from the cache. Raises `GrammarError` if it does not compile."""
        self.load()
        with self._lock:
            return self._compile(grammar)

    def masks(self, matchers: list[Matcher]) -> Bits:
        """Return masks (matchers, 32-bit words) with one bit per token, which is set if the token is allowed next.

        At the end of a grammar, only the end-of-sequence tokens are allowed, and near the limit of an output only
        tokens after which it can still end. If a matcher fails while its mask is computed, its `failure` is set when
        this method returns.
        """
        self._executor = self._executor or LLExecutor()
        bits = allocate_token_bitmask(len(matchers), self._tokenizer.vocab_size)
        fill_next_token_bitmask_par(self._executor, [(m.inner, row) for row, m in enumerate(matchers)], bits)
        for matcher, row in zip(matchers, bits, strict=True):
            matcher.narrow(row)
        return bits

    def _compile_uncached(self, grammar: str) -> CompiledGrammar:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies of the matcher keep the first mask, which is often the slowest
        if matcher.is_error():
            raise GrammarError(f"{GRAMMAR_FAILED} does not compile: {_reason(matcher)}")
        assert self._closer is not None
        return CompiledGrammar(matcher, self._closer, horizon(grammar))

    @property
    def _tokenizer(self) -> LLTokenizer:
        if isinstance(self._vocabulary, LLTokenizer):
            return self._vocabulary
        raise self._vocabulary or GrammarError(f"{GRAMMAR_FAILED} has no tokenizer yet")

    def _read_tokenizer(self) -> LLTokenizer | GrammarError:
        if not self._info.eos_token_ids:
            return GrammarError("grammars need a model with an end-of-sequence token, and this one has none")
        try:
            text = _tokenizer_path(self._info.model_path).read_text(encoding="utf-8")
            return LLTokenizer(text, eos_token=list(self._info.eos_token_ids))
        except (OSError, ValueError) as error:
            return GrammarError(f"grammars need the model's tokenizer.json: {_first_line(str(error))}")


def _tokenizer_path(model: str) -> Path:
    """Return the path of tokenizer.json. `model` is a directory or a hub id."""
    directory = Path(model).expanduser()
    return directory / "tokenizer.json" if directory.is_dir() else Path(hf_hub_download(model, "tokenizer.json"))


def forbid_tokens(bits: Bits, token_ids: Iterable[int]) -> None:
    """Clear the bits of `token_ids` in `bits`, one row (words,) of a mask, in place.

    If the mask allows no other token, do nothing.
    """
    rest = bits.view(np.uint32).copy()
    for token_id in token_ids:
        if 0 <= token_id < 32 * len(rest):
            rest[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if rest.any():
        bits.view(np.uint32)[:] = rest


def _reason(matcher: LLMatcher) -> str:
    return _first_line(matcher.get_error())


def _first_line(text: str) -> str:
    """Return the first line of a message. The lines after it hold the parser's state and the user's schema."""
    return text.strip().split("\n", 1)[0][:_MAX_REASON_LENGTH]
