"""Grammar masks, with the demo model's tokenizer and with a small one made here."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from demo_model.location import demo_model_path
from engine.grammar import Bits, Grammars, forbid_tokens
from engine.interface import EngineInfo, GrammarError
from engine.native.sampling.pipeline import apply_masks

DEMO = EngineInfo(
    str(demo_model_path()),
    max_model_len=64,
    vocab_size=1024,
    block_size=4,
    num_blocks=4,
    max_step_tokens=64,
    eos_token_ids=(4, 0),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789-"


@pytest.fixture
def letters(tmp_path: Path) -> EngineInfo:
    """A model of 40 logits whose tokenizer has 38 tokens: 0 ends a sequence, 1 and above are letters."""
    vocab = {"<|end|>": 0, **{letter: i + 1 for i, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return replace(DEMO, model_path=str(tmp_path), vocab_size=40, eos_token_ids=(0,))


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def allowed(bits: Bits, vocab_size: int) -> list[set[int]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.zeros(len(bits) + 1, vocab_size, device=device)
    apply_masks(logits, list(range(1, len(bits) + 1)), bits)
    assert (logits[0] == 0).all(), "a row without a grammar"
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits[1:]]


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) + 1 for letter in text]


def test_masks_allow_what_the_grammar_allows_next(letters: EngineInfo) -> None:
    grammars = Grammars(letters)
    matchers = [grammars.compile(regex(pattern)).matcher() for pattern in ("[a-c]*x", "ab", "(ab)?")]
    assert allowed(grammars.masks(matchers), 40) == [set(ids("abcx")), set(ids("a")), {*ids("a"), 0}]
    for matcher in matchers:
        matcher.consume(ids("a"))
    assert allowed(grammars.masks(matchers), 40) == [set(ids("abcx")), set(ids("b")), set(ids("b"))]
    matchers[1].consume(ids("b"))
    matchers[2].consume(ids("b"))
    assert allowed(grammars.masks(matchers), 40) == [set(ids("abcx")), {0}, {0}]


def test_sequences_with_the_same_grammar_have_separate_states(letters: EngineInfo) -> None:
    grammars = Grammars(letters)
    first, second = grammars.compile(regex("abc")).matcher(), grammars.compile(regex("abc")).matcher()
    first.consume(ids("ab"))
    third = grammars.compile(regex("abc")).matcher()
    assert allowed(grammars.masks([first, second, third]), 40) == [set(ids("c")), set(ids("a")), set(ids("a"))]
    assert [m.num_consumed for m in (first, second, third)] == [2, 0, 0]


def test_tokens_that_the_tokenizer_does_not_have_are_forbidden(letters: EngineInfo) -> None:
    bits = np.full((1, 2), -1, dtype=np.int32)
    assert allowed(bits, 40) == [set(range(40))]
    assert allowed(bits, 70) == [set(range(64))]
    grammars = Grammars(letters)
    anything = grammars.compile(regex("[a-z0-9-]*")).matcher()
    assert allowed(grammars.masks([anything]), 64) == [set(range(38))]


def test_stop_tokens_are_forbidden_unless_nothing_else_is_allowed(letters: EngineInfo) -> None:
    grammars = Grammars(letters)
    bits = grammars.masks([grammars.compile(regex("a?")).matcher(), grammars.compile(regex("")).matcher()])
    for row in bits:
        forbid_tokens(row, [0, 31, 10**6, -1])
    assert allowed(bits, 40) == [set(ids("a")), {0}]
    every = np.full((1, 2), -1, dtype=np.int32)
    forbid_tokens(every[0], [31, 32, 63])
    assert allowed(every, 64) == [set(range(64)) - {31, 32, 63}]


@pytest.mark.parametrize("grammar", ["", "start: /[/", "{}", '{"grammars": []}', "nonsense", regex("(?<=a)b")])
def test_a_bad_grammar_is_refused_with_a_short_reason(grammar: str) -> None:
    with pytest.raises(GrammarError, match="does not compile: .") as refused:
        Grammars(DEMO).compile(grammar)
    assert "\n" not in str(refused.value)


def test_a_token_that_breaks_the_grammar_is_a_permanent_error(letters: EngineInfo) -> None:
    grammars = Grammars(letters)
    matcher = grammars.compile(regex("abc")).matcher()
    with pytest.raises(GrammarError, match="cannot be followed"):
        matcher.consume(ids("x"))
    assert matcher.failure is not None
    healthy = grammars.compile(regex("abc")).matcher()
    assert allowed(grammars.masks([matcher, healthy]), 40)[1] == set(ids("a"))
    assert healthy.failure is None


def test_a_model_without_a_tokenizer_or_end_of_sequence_refuses_grammars(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        Grammars(replace(DEMO, model_path=str(tmp_path))).compile(regex("a"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        Grammars(replace(DEMO, model_path=str(tmp_path))).compile(regex("a"))
    with pytest.raises(GrammarError, match="end-of-sequence"):
        Grammars(replace(DEMO, eos_token_ids=())).compile(regex("a"))
