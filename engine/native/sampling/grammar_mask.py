"""Mask the logits of the tokens that a grammar forbids. Knows tensors; does not know grammars."""

import numpy as np
import torch
from torch import Tensor

from engine.grammar import Bits


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
