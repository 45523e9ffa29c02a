"""Each kernel compared with the same arithmetic in torch's operators, in both dtypes."""

import random
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.native.attention.kernels import HeadShape, PagedChunks, PagedRows, Scoring
from engine.native.cpu.kernels import CpuKernels, Norm
from tests.engine.native.cpu.compiled import compiled_library
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


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return wide.to(x.dtype) * norm.weight


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


def rotate(heads: Tensor, norm: Norm | None, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate (rows, heads, head_dim) as transformers does."""
    heads = heads if norm is None else rms_norm(heads, norm)
    rotary = cosines.shape[-1]
    turned, rest = heads[..., :rotary].float(), heads[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    quarter = torch.cat((-second, first), dim=-1)
    turned = turned * cosines[:, None].float() + quarter * sines[:, None].float()
    return torch.cat((turned.to(heads.dtype), rest), dim=-1)


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
    lengths = [1, 4, 5, 33, 512, 513, 1100]
    rng = random.Random(5)
    blocks = [rng.sample(range(NUM_BLOCKS), -(-n // BLOCK_SIZE)) for n in lengths]
    longest = max(map(len, blocks))
    table = torch.tensor([own + [0] * (longest - len(own)) for own in blocks])
    slots = torch.randn(2 * shape.num_kv_heads * NUM_BLOCKS * BLOCK_SIZE, shape.head_dim).to(dtype)
    # A strided part of wider rows, as the fused layer passes it.
    wide = torch.randn(len(lengths), 2 * shape.query_width).to(dtype)
    query = wide[:, : shape.query_width].unflatten(1, (-1, shape.head_dim)).transpose(0, 1)
    sinks = torch.randn(shape.num_query_heads) if with_sinks else None
    paged = PagedRows(slots, table, torch.tensor(lengths), BLOCK_SIZE)
    attended = kernels.paged_decode(query, shape.num_kv_heads, paged, Scoring(0.3, softcap, window, sinks))
    for row, (length, own) in enumerate(zip(lengths, blocks, strict=True)):
        cache = slots.view(2, shape.num_kv_heads, NUM_BLOCKS, BLOCK_SIZE, shape.head_dim)[:, :, own]
        keys, values = cache.flatten(2, 3)[:, :, :length].float()
        expected = attend(query[:, row].float(), keys, values, 0.3, softcap, window, sinks)
        assert_close(attended[row], expected)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention (heads, d) of the last token: `query` (heads, d), keys and values (kv_heads, length, d)."""
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("hd,hld->hl", query, keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[:, : max(0, keys.shape[1] - window)] = float("-inf")
    columns = scores if sinks is None else torch.cat((scores, sinks[:, None]), dim=-1)
    weights = columns.softmax(-1)[:, : keys.shape[1]]
    return torch.einsum("hl,hld->hd", weights, values)


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
    spans = [(0, 2), (0, 40), (3, 17), (37, 90), (100, 101)]  # positions of each chunk's tokens
    rng = random.Random(5)
    blocks = [rng.sample(range(NUM_BLOCKS), -(-end // BLOCK_SIZE)) for _, end in spans]
    first_rows = list(accumulate((end - start for start, end in spans), initial=0))
    begins = accumulate(map(len, blocks), initial=0)
    extents = torch.tensor(
        [[row, end - start, start, begin] for row, (start, end), begin in zip(first_rows, spans, begins, strict=False)]
    )
    slots = torch.randn(2 * shape.num_kv_heads * NUM_BLOCKS * BLOCK_SIZE, shape.head_dim).to(dtype)
    wide = torch.randn(first_rows[-1], 2 * shape.query_width).to(dtype)
    query = wide[:, : shape.query_width].unflatten(1, (-1, shape.head_dim)).transpose(0, 1)
    sinks = torch.randn(shape.num_query_heads) if with_sinks else None
    chunks = PagedChunks(slots, torch.tensor(sum(blocks, [])), extents, BLOCK_SIZE, longest=53)
    attended = kernels.paged_prefill(query, shape.num_kv_heads, chunks, Scoring(0.3, softcap, window, sinks))
    assert attended is not None
    for (start, end), own, first_row in zip(spans, blocks, first_rows, strict=False):
        cache = slots.view(2, shape.num_kv_heads, NUM_BLOCKS, BLOCK_SIZE, shape.head_dim)[:, :, own].flatten(2, 3)
        for position in range(start, end):
            row = first_row + position - start
            keys, values = cache[:, :, : position + 1].float()
            expected = attend(query[:, row].float(), keys, values, 0.3, softcap, window, sinks)
            assert_close(attended[row], expected)


def test_other_head_sizes_have_no_prefill_kernel(kernels: CpuKernels, dtype: torch.dtype) -> None:
    slots = torch.zeros(2 * NUM_BLOCKS * BLOCK_SIZE, 20, dtype=dtype)
    chunks = PagedChunks(slots, torch.tensor([1]), torch.tensor([[0, 3, 0, 0]]), BLOCK_SIZE, longest=3)
    assert kernels.paged_prefill(torch.zeros(2, 3, 20, dtype=dtype), 1, chunks, Scoring(1.0)) is None


def test_a_nan_in_a_context_affects_its_own_row_only(kernels: CpuKernels, dtype: torch.dtype) -> None:
    slots = torch.randn(2 * NUM_BLOCKS * BLOCK_SIZE, 8).to(dtype)
    slots[3 * BLOCK_SIZE] = float("nan")
    paged = PagedRows(slots, torch.tensor([[1], [3]]), torch.tensor([4, 4]), BLOCK_SIZE)
    attended = kernels.paged_decode(torch.randn(2, 2, 8).to(dtype), 1, paged, Scoring(1.0))
    assert attended[0].isfinite().all()
    assert attended[1].isnan().all()


def test_other_dtypes_have_no_kernels() -> None:
    library = compiled_library()
    with pytest.raises(ValueError, match="float16"):
        CpuKernels(library, torch.float16)
