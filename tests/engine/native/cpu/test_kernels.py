"""Each kernel compared with its definition, in both dtypes."""

from itertools import product
from typing import Any

import pytest
import torch

from engine.native.attention.kernels import HeadShape, PagedChunks, Scoring
from engine.native.cpu.kernels import PREFILL_HEAD_DIMS, CpuKernels
from tests.engine.native.cpu.compiled import compiled_library
from tests.engine.native.reference import (
    RandomCache,
    check_activate_and_mul,
    check_decode,
    check_nan,
    check_norms,
    check_prefill,
    check_rotate_and_write,
)


@pytest.fixture(params=(torch.float32, torch.bfloat16), ids=str)
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def kernels(dtype: torch.dtype) -> CpuKernels:
    return CpuKernels(compiled_library(), dtype)


@pytest.mark.parametrize(("rows", "n"), [(1, 7), (3, 576), (40, 64)])
def test_norms(kernels: CpuKernels, dtype: torch.dtype, rows: int, n: int) -> None:
    check_norms(kernels, dtype, "cpu", rows, n)


def test_activate_and_mul(kernels: CpuKernels, dtype: torch.dtype) -> None:
    check_activate_and_mul(kernels, dtype, "cpu", 37)


@pytest.mark.parametrize("rotary", [16, 8])
@pytest.mark.parametrize("norms_of", ["", "a head", "all heads"])
def test_rotate_and_write(kernels: CpuKernels, dtype: torch.dtype, rotary: int, norms_of: str) -> None:
    check_rotate_and_write(kernels, dtype, "cpu", HeadShape(6, 2, 16), rotary, norms_of)


def make_cache(shape: HeadShape, dtype: torch.dtype, lengths: list[int]) -> RandomCache:
    return RandomCache(shape, 4, 400, dtype, "cpu", lengths)


SHAPES = [HeadShape(4, 4, 16), HeadShape(9, 3, 64), HeadShape(8, 1, 128)]
SCORINGS = ((None, 2.0), (None, 5), (False, True))  # soft cap; window; sinks


@pytest.mark.parametrize(
    ("shape", "softcap", "window", "with_sinks"), [*product((*SHAPES, HeadShape(6, 2, 20)), *SCORINGS)]
)
def test_attention(
    kernels: CpuKernels,
    dtype: torch.dtype,
    shape: HeadShape,
    softcap: float | None,
    window: int | None,
    with_sinks: bool,
) -> None:
    cache = make_cache(shape, dtype, [1, 4, 5, 33, 512, 513, 1100])
    check_decode(kernels, cache, Scoring(0.3, softcap, window, cache.sinks if with_sinks else None))
    if kernels.can_prefill(shape):
        cache = make_cache(shape, dtype, [2, 40, 17, 90, 101])
        scoring = Scoring(0.3, softcap, window, cache.sinks if with_sinks else None)
        check_prefill(kernels, cache, [0, 0, 3, 37, 100], scoring)


@pytest.mark.parametrize("head_dim", PREFILL_HEAD_DIMS)
def test_prefill_of_every_compiled_head_size(kernels: CpuKernels, dtype: torch.dtype, head_dim: int) -> None:
    cache = make_cache(HeadShape(4, 2, head_dim), dtype, [2, 17, 90])
    check_prefill(kernels, cache, [0, 3, 37], Scoring(0.1))


def test_a_nan_in_a_context_affects_its_own_row_only(kernels: CpuKernels, dtype: torch.dtype) -> None:
    check_nan(kernels, dtype, "cpu")


def test_other_head_sizes_have_no_prefill_kernel(kernels: CpuKernels, dtype: torch.dtype) -> None:
    slots = torch.zeros(64, 20, dtype=dtype)
    chunks = PagedChunks(slots, torch.tensor([1]), torch.tensor([[0, 3, 0, 0]]), block_size=4, longest=3)
    assert kernels.paged_prefill(torch.zeros(2, 3, 20, dtype=dtype), 1, chunks, Scoring(1.0)) is None


def test_what_does_not_fit_is_refused() -> None:
    library = compiled_library()
    with pytest.raises(ValueError, match="float16"):
        CpuKernels(library, torch.float16)
    kernels, cache = CpuKernels(library, torch.float32), make_cache(HeadShape(3, 1, 8), torch.float32, [4])
    with pytest.raises(ValueError, match="do not fit this cache"):
        kernels.paged_decode(cache.query[:, :1], 2, cache.rows(), Scoring(1.0))
    with pytest.raises(ValueError, match="do not fit"):
        slots, row = torch.zeros(8, 8), torch.zeros(1)
        kernels.rotate_and_write(torch.zeros(1, 33), HeadShape(2, 1, 8), slots, row.long(), row, row, None, None)
