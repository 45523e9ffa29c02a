"""Where Triton's kernels can run: on a GPU, or in Triton's interpreter, which computes them with numpy on a CPU."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

NEEDS_TRITON = [
    pytest.mark.skipif(not (HAS_GPU or _IS_INTERPRETED), reason="no GPU, and not in Triton's interpreter"),
    # The interpreter computes with numpy, which warns about NaN and the numbers of padding rows: they may be anything.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]
