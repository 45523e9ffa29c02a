"""Sample the next token of each row with sampling.cpp.

Knows logits and sampling parameters. The C++ code makes a few passes over the logits, while torch makes thirty, and the
C++ code sorts only a small part of the logits. The result is that of `engine.sampling.sampler.sample`, except
for rounding at a top_p, top_k or min_p threshold.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from engine.sampling.sampler import SamplingRow, uniform

_NAMES = {torch.float32: "draw_tokens_float32", torch.bfloat16: "draw_tokens_bfloat16"}
# The numpy counterpart of the struct `Rule` in sampling.cpp.
_RULE = np.dtype([("temperature", "f4"), ("uniform", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i8")])


class CpuSampler:
    """A `Sampler` that calls the C++ library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = {}
        for dtype, name in _NAMES.items():
            function = getattr(library, name)
            function.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, ctypes.c_int]
            function.restype = None
            self._draw[dtype] = function

    def __call__(self, logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
        """Return a token id for each row of `logits` (rows, vocab); None for a row with NaN, +inf or only -inf.

        Logits that are not float32 or bfloat16 are converted to float32.
        """
        logits = logits.contiguous() if logits.dtype in _NAMES else logits.float().contiguous()
        rules = np.array([_rule(row) for row in rows], dtype=_RULE)
        out = np.empty(len(rows), dtype=np.int64)
        num_rows, vocab_size = logits.shape
        draw = self._draw[logits.dtype]
        draw(out.ctypes.data, logits.data_ptr(), rules.ctypes.data, num_rows, vocab_size, torch.get_num_threads())
        return [token_id if token_id >= 0 else None for token_id in out.tolist()]


def _rule(row: SamplingRow) -> tuple[float, float, float, float, int]:
    """Return the fields of `_RULE`; temperature 0 means greedy."""
    if row.is_greedy:
        return (0.0, 0.0, 1.0, 0.0, 0)
    params = row.params
    return (params.temperature, uniform(row), params.top_p, params.min_p, params.top_k)
