"""Compute which tokens a grammar allows next, and mask the logits of all other tokens.

Knows llguidance, the model's tokenizer and the state of a sequence in its grammar; does not know steps or sampling.
"""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from torch import Tensor
from transformers.utils import cached_file

from engine.interface import GRAMMAR_FAILED, EngineInfo

_MAX_COMPILED = 64  # compiled grammars kept (LRU): bulk traffic repeats the same few grammars
_MAX_REASON_LENGTH = 300  # characters of llguidance's error messages

Bits = npt.NDArray[np.int32]


class GrammarError(Exception):
    """Raised if a grammar cannot be compiled or the output does not match it. The message is shown to the user."""


class Matcher:
    """The state of a sequence's grammar after the first `num_consumed` tokens of its output."""

    __slots__ = ("inner", "num_consumed")

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner
        self.num_consumed = 0

    def consume(self, output_token_ids: Iterable[int]) -> None:
        """Advance the state by the next output tokens. Raises `GrammarError` if the grammar does not allow them."""
        token_ids = list(output_token_ids)
        self.inner.consume_tokens(token_ids)
        if self.failure is not None:
            raise GrammarError(self.failure)
        self.num_consumed += len(token_ids)

    @property
    def failure(self) -> str | None:
        """The reason why the grammar has failed, as text for the user; None if it has not failed."""
        return f"{GRAMMAR_FAILED} cannot be followed: {_reason(self.inner)}" if self.inner.is_error() else None


class Grammars:
    """The compiled grammars of one model, and their masks. The tokenizer is read when the first grammar is compiled."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._compile = lru_cache(_MAX_COMPILED)(self._compile_uncached)
        self._vocabulary: LLTokenizer | None = None
        self._executor: LLExecutor | None = None

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of `grammar`. Raises `GrammarError` if the grammar does not compile."""
        return Matcher(self._compile(grammar).deep_copy())

    def masks(self, matchers: list[Matcher]) -> Bits:
        """Return masks (matchers, 32-bit words) with one bit per token, which is set if the token is allowed next.

        At the end of a grammar, only the end-of-sequence tokens are allowed. If a matcher fails while its mask is
        computed, its `failure` is set when this method returns.
        """
        self._executor = self._executor or LLExecutor()
        bits = allocate_token_bitmask(len(matchers), self._tokenizer().vocab_size)
        fill_next_token_bitmask_par(self._executor, [(m.inner, row) for row, m in enumerate(matchers)], bits)
        return bits

    def _compile_uncached(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"{GRAMMAR_FAILED} does not compile: {_reason(matcher)}")
        return matcher

    def _tokenizer(self) -> LLTokenizer:
        if self._vocabulary is None:
            if not self._info.eos_token_ids:
                raise GrammarError("grammars need a model with an end-of-sequence token, and this one has none")
            try:
                path = cached_file(str(Path(self._info.model_path).expanduser()), "tokenizer.json")
                text = Path(path).read_text(encoding="utf-8")
                self._vocabulary = LLTokenizer(text, eos_token=list(self._info.eos_token_ids))
            except (OSError, ValueError) as error:
                raise GrammarError(f"grammars need the model's tokenizer.json: {_first_line(str(error))}") from error
        return self._vocabulary


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


def apply_masks(logits: Tensor, rows: list[int], bits: Bits) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    `logits` is (all rows, vocab) in float32. `bits` is (len(rows), words): `bits[i]` is the mask of row `rows[i]` of
    the logits. Tokens that the tokenizer does not have are forbidden, too.
    """
    octets = torch.from_numpy(bits.view(np.uint8)).to(logits.device)
    # A table maps each of the 256 octets to eight flags (true if forbidden), which are packed as one int64. So one
    # gather from the table expands all bits.
    flags = (torch.arange(256, device=logits.device)[:, None] >> torch.arange(8, device=logits.device)) & 1 == 0
    forbidden = flags.view(torch.int64)[:, 0][octets.int()].view(torch.bool)
    forbidden = torch.nn.functional.pad(forbidden, (0, logits.shape[-1] - forbidden.shape[-1]), value=True)
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        index = torch.tensor(rows, device=logits.device)
        logits[index] = logits[index].masked_fill_(forbidden, float("-inf"))


def _reason(matcher: LLMatcher) -> str:
    return _first_line(matcher.get_error())


def _first_line(text: str) -> str:
    """Return the first line of a message. The lines after it hold the parser's state and the user's schema."""
    return text.strip().split("\n", 1)[0][:_MAX_REASON_LENGTH]
