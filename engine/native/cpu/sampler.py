"""The next token of every row by sampling.cpp: a few passes over the logits where torch takes thirty, and no sorting.

Knows logits and sampling parameters. The result is that of `engine.native.sampling.sampler.sample`, within rounding at
the edges of a cut.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from engine.native.sampling.sampler import SamplingRow, uniform

_NAMES = {torch.float32: "draw_tokens_float32", torch.bfloat16: "draw_tokens_bfloat16"}
_RULE = np.dtype([("temperature", "f4"), ("uniform", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i8")])


class CpuSampler:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = {}
        for dtype, name in _NAMES.items():
            function = getattr(library, name)
            function.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, ctypes.c_int]
            function.restype = None
            self._draw[dtype] = function

    def __call__(self, logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
        """Token ids for (rows, vocab) logits; None for a row that holds NaN or +inf, or nothing but -inf."""
        logits = logits.contiguous() if logits.dtype in _NAMES else logits.float().contiguous()
        rules = np.array([_rule(row) for row in rows], dtype=_RULE)
        out = np.empty(len(rows), dtype=np.int64)
        num_rows, vocab_size = logits.shape
        draw = self._draw[logits.dtype]
        draw(out.ctypes.data, logits.data_ptr(), rules.ctypes.data, num_rows, vocab_size, torch.get_num_threads())
        return [token_id if token_id >= 0 else None for token_id in out.tolist()]


def _rule(row: SamplingRow) -> tuple[float, float, float, float, int]:
    if row.is_greedy:
        return (0.0, 0.0, 1.0, 0.0, 0)
    params = row.params
    return (params.temperature, uniform(row), params.top_p, params.min_p, params.top_k)
