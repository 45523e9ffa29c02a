"""Penalties, bias and forbidden stops compared with transformers' processors and plain definitions."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    NoBadWordsLogitsProcessor,
)

from engine.sampling.penalties import Penalties, add_bias, apply_penalties, forbid
from engine.sequences.sequence import Sequence
from tests.engine.drive import make_new

VOCAB_SIZE = 60
EOS = 7


def make_sequence(prompt: list[int], output: list[int], **sampling: Any) -> Sequence:
    sequence = Sequence(make_new("a", prompt, max_tokens=1000, **sampling), 10_000, (EOS,))
    for token_id in output:
        sequence.append(token_id)
    return sequence


def penalised(logits: Tensor, *sequences: Sequence) -> Tensor:
    penalties = [Penalties(sequence, logits.shape[-1]) for sequence in sequences]
    for own, sequence in zip(penalties, sequences, strict=True):
        own.update(sequence)
    changed = logits.clone()
    add_bias(changed, penalties)
    apply_penalties(changed, penalties)
    forbid(changed, penalties)
    return changed


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def make_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = make_logits(1, 0)
    sequence = make_sequence([1, 2, 3, 3], [2, 5, 5, 5], presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.clone()
    expected[0, 2] -= 0.75
    expected[0, 5] -= 1.25
    torch.testing.assert_close(penalised(logits, sequence), expected)


def test_the_order_is_bias_repetition_presence() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, :3] = torch.tensor([4.0, -4.0, 4.0])
    sequence = make_sequence(
        [0, 1], [0], repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((0, 10.0), (2, -3.0))
    )
    assert penalised(logits, sequence)[0, :3].tolist() == [(4 + 10) / 2 - 1, -4 * 2, 4 - 3]


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    """A user may name token ids that the model does not have."""
    logits = make_logits(1, 0)
    bias = ((-1, 5.0), (VOCAB_SIZE, 5.0), (10**9, 5.0))
    stops = (-3, VOCAB_SIZE + 5)
    sequence = make_sequence([1], [], logit_bias=bias, stop_token_ids=stops, min_tokens=1, ignore_eos=True)
    assert torch.equal(penalised(logits, sequence), logits)


@pytest.mark.parametrize("num_output", range(6))
def test_bad_words_equal_those_of_transformers(num_output: int) -> None:
    words = ((5,), (10, 11), (10, 11, 12), (11, 10, 13))
    logits, output = make_logits(1, num_output), [10, 11, 10, 11, 5][:num_output]
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=EOS)
    expected = processor(torch.tensor([[1, *output]]), logits.clone())
    assert torch.equal(penalised(logits, make_sequence([1], output, bad_words=words)), expected)


def test_bad_words_are_searched_in_the_output_only() -> None:
    logits = make_logits(1, 0)
    assert torch.equal(penalised(logits, make_sequence([10], [], bad_words=((10, 11),))), logits)


def test_only_allowed_tokens_are_left() -> None:
    logits = make_logits(2, 0)
    changed = penalised(logits, make_sequence([1], [], allowed_token_ids=(3, 9, VOCAB_SIZE)), make_sequence([1], []))
    assert changed[0].isfinite().nonzero()[:, 0].tolist() == [3, 9]
    assert torch.equal(changed[0, [3, 9]], logits[0, [3, 9]])
    assert torch.equal(changed[1], logits[1])


def test_a_row_does_not_depend_on_other_rows() -> None:
    rng = random.Random(1)
    logits = make_logits(8, 1)
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.4, "logit_bias": ((3, 2.5), (59, -7.0))},
        {"min_tokens": 50, "stop_token_ids": (1, 2)},
        {"repetition_penalty": 0.8, "frequency_penalty": 0.3, "min_tokens": 3},
        {"logit_bias": ((0, 1.0),)},
        {"bad_words": ((3,), (4, 5)), "presence_penalty": 0.5},
        {"allowed_token_ids": (3, 4, 5)},
    ]
    sequences = [make_sequence(random_tokens(rng, 15), random_tokens(rng, 10), **chosen) for chosen in options]
    together = penalised(logits, *sequences)
    for i, sequence in enumerate(sequences):
        assert torch.equal(together[i : i + 1], penalised(logits[i : i + 1], sequence))
    assert torch.equal(penalised(logits.flip(0), *reversed(sequences)), together.flip(0))
