"""Each kernel compared with the same arithmetic in torch's operators, in both dtypes."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.native.attention.kernels import HeadShape, PagedChunks, Scoring
from engine.native.cpu.kernels import CpuKernels, Norm
from tests.engine.native.cpu.compiled import compiled_library
from tests.engine.native.reference import RandomCache, attend, rms_norm, rotate
from tests.marks import mostly_full

DTYPES = (torch.float32, torch.bfloat16)
BLOCK_SIZE = 4
NUM_BLOCKS = 400


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def kernels(dtype: torch.dtype) -> CpuKernels:
    return CpuKernels(compiled_library(), dtype)


@pytest.fixture(autouse=True)
def seeded() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Assert equality up to one rounding in bfloat16 (the kernels round less often), or four digits in float32."""
    tolerance = 3e-5 if actual.dtype is torch.float32 else 0.02
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("rows", "n"), [(1, 7), (3, 576), (40, 64)])
def test_rms_norm(kernels: CpuKernels, dtype: torch.dtype, rows: int, n: int) -> None:
    norm = Norm(torch.randn(n, dtype=dtype), 1e-5)
    x = torch.randn(rows, n, dtype=dtype) * 5
    assert_close(kernels.rms_norm(x, norm), rms_norm(x, norm))


def test_add_rms_norm_changes_the_residual_in_place(kernels: CpuKernels, dtype: torch.dtype) -> None:
    norm = Norm(torch.randn(48, dtype=dtype), 1e-6)
    x, residual = torch.randn(5, 48, dtype=dtype), torch.randn(5, 48, dtype=dtype)
    total = x + residual
    assert_close(kernels.add_rms_norm(residual, x, norm), rms_norm(total, norm))
    assert_close(residual, total)


def test_silu_and_mul(kernels: CpuKernels, dtype: torch.dtype) -> None:
    gate_up = torch.randn(6, 2 * 37, dtype=dtype) * 20
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(kernels.silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("rotary", [16, 8])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rotate_and_write(kernels: CpuKernels, dtype: torch.dtype, rotary: int, with_norms: bool) -> None:
    shape, rows = HeadShape(6, 2, 16), 5
    qkv = torch.randn(rows, shape.query_width + 2 * shape.kv_width, dtype=dtype)
    slots = torch.zeros(2 * shape.num_kv_heads * NUM_BLOCKS * BLOCK_SIZE, shape.head_dim, dtype=dtype)
    slot_ids = torch.tensor([9, 3, 1599, 0, 77])
    angles = torch.rand(rows, rotary // 2).repeat(1, 2) * 6
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = [Norm(torch.randn(16, dtype=dtype), 1e-6) if with_norms else None for _ in range(2)]
    heads = qkv.clone().unflatten(1, (-1, shape.head_dim))
    expected = [
        rotate(heads[:, :6], norms[0], cosines, sines),
        rotate(heads[:, 6:8], norms[1], cosines, sines),
        heads[:, 8:],
    ]
    kernels.rotate_and_write(qkv, shape, slots, slot_ids, cosines, sines, norms[0], norms[1])
    assert_close(qkv, torch.cat(expected, dim=1).flatten(1))
    written = slots.view(2, shape.num_kv_heads, -1, shape.head_dim)[:, :, slot_ids]
    assert_close(written, torch.stack(expected[1:]).transpose(1, 2))
    assert int((slots != 0).any(-1).sum()) == rows * 2 * shape.num_kv_heads  # and nowhere else


def make_cache(shape: HeadShape, dtype: torch.dtype, lengths: list[int]) -> RandomCache:
    return RandomCache(shape, BLOCK_SIZE, NUM_BLOCKS, dtype, "cpu", lengths)


SHAPES = [HeadShape(4, 4, 16), HeadShape(9, 3, 64), HeadShape(8, 1, 128)]
SCORINGS = ((None, 2.0), (None, 5), (False, True))  # soft cap; window; sinks


def every_pair(*shapes: HeadShape) -> list[tuple[Any, ...]]:
    """Return cases in which each shape and each two choices of `SCORINGS` meet."""
    plain, full = [choices[0] for choices in SCORINGS], [choices[1] for choices in SCORINGS]
    mixed = [(None, 5, True), (2.0, None, True), (2.0, 5, False)]
    cases = [(shape, *mixed[i % 3]) for i, shape in enumerate(shapes)]
    return [*cases, *((shape, *plain) for shape in shapes), *((shape, *full) for shape in shapes)]


@pytest.mark.parametrize(
    ("shape", "softcap", "window", "with_sinks"),
    mostly_full(product((*SHAPES, HeadShape(6, 2, 20)), *SCORINGS), *every_pair(*SHAPES, HeadShape(6, 2, 20))),
)
def test_paged_decode(
    kernels: CpuKernels,
    dtype: torch.dtype,
    shape: HeadShape,
    softcap: float | None,
    window: int | None,
    with_sinks: bool,
) -> None:
    cache = make_cache(shape, dtype, [1, 4, 5, 33, 512, 513, 1100])
    scoring = Scoring(0.3, softcap, window, cache.sinks if with_sinks else None)
    query = cache.query[:, : len(cache.lengths)]
    attended = kernels.paged_decode(query, shape.num_kv_heads, cache.rows(), scoring)
    for row in range(len(cache.lengths)):
        assert_close(attended[row], attend(query[:, row], cache.context(row), scoring))


@pytest.mark.parametrize(
    ("shape", "softcap", "window", "with_sinks"), mostly_full(product(SHAPES, *SCORINGS), *every_pair(*SHAPES))
)
def test_paged_prefill(
    kernels: CpuKernels,
    dtype: torch.dtype,
    shape: HeadShape,
    softcap: float | None,
    window: int | None,
    with_sinks: bool,
) -> None:
    starts = [0, 0, 3, 37, 100]
    cache = make_cache(shape, dtype, [2, 40, 17, 90, 101])
    scoring = Scoring(0.3, softcap, window, cache.sinks if with_sinks else None)
    chunks = cache.chunks(starts)
    query = cache.query[:, : sum(cache.lengths) - sum(starts)]
    attended = kernels.paged_prefill(query, shape.num_kv_heads, chunks, scoring)
    assert attended is not None
    row = 0
    for i, (start, end) in enumerate(zip(starts, cache.lengths, strict=True)):
        for position in range(start, end):
            assert_close(attended[row], attend(query[:, row], cache.context(i)[:, :, : position + 1], scoring))
            row += 1


def test_a_nan_in_a_context_affects_its_own_row_only(kernels: CpuKernels, dtype: torch.dtype) -> None:
    cache = make_cache(HeadShape(2, 1, 8), dtype, [4, 4])
    cache.slots[cache.blocks[1][0] * BLOCK_SIZE] = float("nan")
    attended = kernels.paged_decode(cache.query[:, :2], 1, cache.rows(), Scoring(1.0))
    assert attended[0].isfinite().all()
    assert attended[1].isnan().all()


def test_other_head_sizes_have_no_prefill_kernel(kernels: CpuKernels, dtype: torch.dtype) -> None:
    slots = torch.zeros(2 * NUM_BLOCKS * BLOCK_SIZE, 20, dtype=dtype)
    chunks = PagedChunks(slots, torch.tensor([1]), torch.tensor([[0, 3, 0, 0]]), BLOCK_SIZE, longest=3)
    assert kernels.paged_prefill(torch.zeros(2, 3, 20, dtype=dtype), 1, chunks, Scoring(1.0)) is None


def test_other_dtypes_have_no_kernels() -> None:
    library = compiled_library()
    with pytest.raises(ValueError, match="float16"):
        CpuKernels(library, torch.float16)
