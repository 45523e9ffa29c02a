"""Sample the next token of each row with a Triton kernel, so that the host never waits for the device.

Knows logits and sampling parameters. The result is that of `engine.sampling.sampler.sample_ids`, except for rounding at
a top_p, top_k or min_p threshold.
"""

from math import log

import numpy as np
import torch
from torch import Tensor

from engine.native.batch.tensors import Upload
from engine.native.cuda.triton_sampling import sample_kernel
from engine.sampling.sampler import SamplingRow, uniform

_TILE = 4096  # logits that a program reads at once
_ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 that the dtype lacks


class TritonSampler:
    """A function from logits (rows, vocab) and their rows to token ids (rows,), like `sample_ids`.

    `upload` copies the sampling parameters to the device without waiting.
    """

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def __call__(self, logits: Tensor, rows: list[SamplingRow]) -> Tensor:
        """Return the token ids (rows,), int64; -1 for a row with NaN, +inf or only -inf."""
        if logits.dtype not in _ZERO_BITS or logits.stride(-1) != 1:
            logits = logits.float().contiguous()
        rules = np.array([_rule(row) for row in rows], dtype=np.float32)
        uploaded = self._upload([rules.reshape(-1).view(np.int64)]).view(torch.float32)
        out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        sample_kernel[(len(rows),)](
            logits,
            uploaded,
            out,
            logits.shape[-1],
            logits.stride(0),
            SHIFT=_ZERO_BITS[logits.dtype],
            TILE=_TILE,
            num_warps=8,
        )
        return out


def _rule(row: SamplingRow) -> tuple[float, ...]:
    """Return the columns of a row's rule, and a last one that fills whole int64 numbers."""
    params = row.params
    if row.is_greedy:
        return (0.0,) * 6
    log_min_p = log(params.min_p) if params.min_p > 0 else float("-inf")
    return (params.temperature, uniform(row), params.top_p, max(0, params.top_k), log_min_p, 0.0)
