"""Make training batches from examples: encode, mark the tokens that count in the loss, and batch rows by length.

Rows of a batch are padded on the right to the length of their bucket. With causal attention, no token sees the padding.
Knows tokens and lengths; does not know what the text says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo_model.training.corpus import Example

BUCKETS = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_ENCODE_AT_ONCE = 512  # examples whose segments are encoded in one call of the tokenizer
_IGNORE = -100  # label of a token that does not count in the loss: the default of cross_entropy


@dataclass(frozen=True, slots=True)
class Batch:
    """A training batch: `input_ids` and `labels`, both int64 (rows, bucket length).

    The labels are already shifted by one: label i is the token after token i.
    """

    input_ids: Tensor
    labels: Tensor


def batches(
    examples: Iterator[Example], tokenizer: PreTrainedTokenizerFast, tokens_per_batch: int, max_tokens: int
) -> Iterator[Batch]:
    """Yield batches of about `tokens_per_batch` tokens, including padding, without end.

    Examples of more than `max_tokens` tokens are left out.
    """
    waiting: dict[int, list[tuple[list[int], list[int]]]] = {length: [] for length in BUCKETS}
    while True:
        for ids, labels in _encode(list(islice(examples, _ENCODE_AT_ONCE)), tokenizer):
            if len(ids) > max_tokens:
                continue
            length = next(bucket for bucket in BUCKETS if bucket >= len(ids))
            waiting[length].append((ids, labels))
            if len(waiting[length]) * length >= tokens_per_batch:
                yield _pad(waiting[length], length, tokenizer.pad_token_id)
                waiting[length] = []


def _encode(examples: list[Example], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each example as token ids and labels of equal length.

    Label i is token i + 1 if this token is to be learned, else `_IGNORE`.
    """
    texts = [segment.text for example in examples for segment in example]
    encoded = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
    for example in examples:
        ids: list[int] = []
        targets: list[int] = []
        for segment in example:
            piece = next(encoded)
            ids += piece
            targets += piece if segment.learn else [_IGNORE] * len(piece)
        yield ids[:-1], targets[1:]


def _pad(rows: list[tuple[list[int], list[int]]], length: int, pad: int) -> Batch:
    return Batch(
        torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows]),
        torch.tensor([labels + [_IGNORE] * (length - len(labels)) for _, labels in rows]),
    )
