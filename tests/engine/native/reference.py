"""What kernels must compute: attention, norms and rotary positions by definition, over a cache of random numbers.

Each `check_…` compares a backend's kernel with its definition; the backends' tests choose dtypes, shapes and devices.
"""

import random

import torch
from torch import Tensor

from engine.native.attention.kernels import AttentionKernels, HeadShape, PagedChunks, PagedRows, Scoring
from engine.native.kv.cache import from_fp8, to_fp8
from engine.native.model.layer_kernels import Activation, LayerKernels, Norm

# Largest allowed difference by dtype: kernels round less often than the definitions, or sum in another order.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 0.005, torch.bfloat16: 0.03}
NUM_SLOTS = 60  # per KV head, where rotated keys are written


def rotate(heads: Tensor, norm: Norm | None, cosines: Tensor, sines: Tensor, in_pairs: bool = False) -> Tensor:
    """Rotate (rows, heads, head_dim) as transformers does, for a norm of each head or of all heads."""
    if norm is not None:
        heads = norm(heads.reshape(len(heads), -1, len(norm.weight))).view_as(heads)
    rotary = cosines.shape[-1]
    turned, rest = heads[..., :rotary].float(), heads[..., rotary:]
    angles = [t[:, None, : rotary // 2].float() for t in (cosines, sines)]
    if in_pairs:
        first, second = turned[..., ::2], turned[..., 1::2]
        beside = torch.stack((-second, first), dim=-1).flatten(-2)
        turned = turned * angles[0].repeat_interleave(2, -1) + beside * angles[1].repeat_interleave(2, -1)
    else:
        first, second = turned.chunk(2, dim=-1)
        turned = turned * angles[0].repeat(1, 1, 2) + torch.cat((-second, first), dim=-1) * angles[1].repeat(1, 1, 2)
    return torch.cat((turned.to(heads.dtype), rest), dim=-1)


def attend(query: Tensor, context: Tensor, scoring: Scoring) -> Tensor:
    """Return the attention (heads, head_dim), float32, of a context's last token with `query` (heads, head_dim)."""
    keys, values = (part.repeat_interleave(len(query) // len(part), 0) for part in context)
    scores = torch.einsum("hd,hld->hl", query.float(), keys) * scoring.scaling
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.window is not None:
        scores[:, : max(0, keys.shape[1] - scoring.window)] = float("-inf")
    columns = scores if scoring.sinks is None else torch.cat((scores, scoring.sinks[:, None]), dim=-1)
    return torch.einsum("hl,hld->hd", columns.softmax(-1)[:, : keys.shape[1]], values)


class RandomCache:
    """A KV cache of random numbers, with a block table for each context."""

    def __init__(
        self,
        shape: HeadShape,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: str,
        lengths: list[int],
        *,
        fp8: bool = False,
    ) -> None:
        self.shape, self.block_size, self.num_blocks, self.lengths = shape, block_size, num_blocks, lengths
        self.device = device
        generator = torch.Generator().manual_seed(3)
        size = (2 * shape.num_kv_heads * num_blocks * block_size, shape.head_dim)
        self.slots, self.scales = torch.randn(size, generator=generator).to(device, dtype), None
        if fp8:  # rows of different sizes
            self.slots, self.scales = to_fp8(self.slots * torch.rand(size[0], 1, generator=generator).to(device, dtype))
        rng = random.Random(5)
        self.blocks = [rng.sample(range(num_blocks), -(-length // block_size)) for length in lengths]
        # A strided part of wider rows, like the output of a fused projection.
        wide = torch.randn(128, 2 * shape.query_width, generator=generator).to(device, dtype)
        self.query = wide[:, : shape.query_width].unflatten(1, (-1, shape.head_dim)).transpose(0, 1)
        self.sinks = torch.randn(shape.num_query_heads, generator=generator).to(device)

    def context(self, sequence: int) -> Tensor:
        """Return keys and values of a context: (2, kv_heads, length, head_dim), float32."""
        numbers = self.slots if self.scales is None else from_fp8(self.slots, self.scales, torch.float32)
        pool = numbers.view(2, self.shape.num_kv_heads, self.num_blocks, self.block_size, self.shape.head_dim)
        return pool[:, :, self.blocks[sequence]].flatten(2, 3)[:, :, : self.lengths[sequence]].float()

    def rows(self) -> PagedRows:
        """Return the last token of each context."""
        longest = max(map(len, self.blocks))
        table = torch.tensor([own + [0] * (longest - len(own)) for own in self.blocks], device=self.device)
        lengths = torch.tensor(self.lengths, device=self.device)
        return PagedRows(self.slots, table, lengths, self.block_size, self.scales)

    def chunks(self, starts: list[int]) -> PagedChunks:
        """Return the tokens of each context from its start on."""
        counts = [end - start for start, end in zip(starts, self.lengths, strict=True)]
        lines = [(sum(counts[:i]), counts[i], starts[i], sum(map(len, self.blocks[:i]))) for i in range(len(counts))]
        tables = torch.tensor(sum(self.blocks, []), device=self.device)
        extents = torch.tensor(lines, device=self.device)
        return PagedChunks(self.slots, tables, extents, self.block_size, max(counts), scales=self.scales)


def randn(*size: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def check_norms(kernels: LayerKernels, dtype: torch.dtype, device: str, rows: int, n: int) -> None:
    """Check both norms: of a row, and of the sum of two rows, which also changes the residual in place."""
    for rounds in (True, False):
        norm = Norm(randn(n, dtype=torch.float32, device=device), 1e-5, rounds)
        x, residual = 5 * randn(rows, n, dtype=dtype, device=device), randn(1, rows, n, dtype=dtype, device=device)[0]
        assert_close(kernels.rms_norm(x, norm), norm(x), dtype)
        total = x + residual
        assert_close(kernels.add_rms_norm(residual, x, norm), norm(total), dtype)
        assert_close(residual, total, dtype)


def check_activate_and_mul(kernels: LayerKernels, dtype: torch.dtype, device: str, n: int) -> None:
    gate_up = 10 * randn(6, 2 * n, dtype=dtype, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    for activation in Activation:
        assert_close(kernels.activate_and_mul(gate_up, activation), activation(gate, up), dtype)


def check_rotate_and_write(
    kernels: LayerKernels,
    dtype: torch.dtype,
    device: str,
    shape: HeadShape,
    rotary: int,
    norms_of: str,
    *,
    fp8: bool = False,
) -> None:
    """Check the queries, keys and values of five rows, and that nothing is written to other slots.

    `norms_of` is what norms take together: nothing, "a head" or "all heads". With the latter, pairs are rotated. With
    `fp8`, codes and scales must be those of the definition for the rotated keys.
    """
    in_pairs = norms_of == "all heads"
    slot_ids = torch.tensor([9, 3, NUM_SLOTS - 1, 0, 17], device=device)
    rows, heads = len(slot_ids), shape.num_query_heads
    qkv = randn(rows, shape.query_width + 2 * shape.kv_width, dtype=dtype, device=device)
    stored = torch.uint8 if fp8 else dtype
    slots = torch.zeros(2 * shape.num_kv_heads * NUM_SLOTS, shape.head_dim, dtype=stored, device=device)
    scales = torch.zeros(len(slots), device=device) if fp8 else None
    angles = 3 * randn(rows, rotary // 2, dtype=torch.float32, device=device).repeat(1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    sizes = (shape.query_width, shape.kv_width) if norms_of == "all heads" else (shape.head_dim, shape.head_dim)
    weights = [randn(1 + i, size, dtype=torch.float32, device=device)[i] for i, size in enumerate(sizes)]
    norms = [Norm(weight, 1e-6, rounds=rotary == shape.head_dim) for weight in weights]
    query_norm, key_norm = norms if norms_of else (None, None)
    before = qkv.clone().unflatten(1, (-1, shape.head_dim))
    queries = rotate(before[:, :heads], query_norm, cosines, sines, in_pairs)
    keys = rotate(before[:, heads : heads + shape.num_kv_heads], key_norm, cosines, sines, in_pairs)
    values = before[:, heads + shape.num_kv_heads :]
    kernels.rotate_and_write(qkv, shape, slots, slot_ids, cosines, sines, query_norm, key_norm, in_pairs, scales)
    assert_close(qkv, torch.cat((queries, keys, values), dim=1).flatten(1), dtype)
    written = slots.view(2, shape.num_kv_heads, -1, shape.head_dim)[:, :, slot_ids]
    if scales is None:
        assert_close(written, torch.stack((keys, values)).transpose(1, 2), dtype)
    else:
        rotated = qkv.unflatten(1, (-1, shape.head_dim))[:, heads:].unflatten(1, (2, -1)).permute(1, 2, 0, 3)
        codes, expected = to_fp8(rotated)
        # Compiled for a GPU, the quotients round otherwise: a few may get the code beside.
        is_same = written == codes
        assert is_same.all() if device == "cpu" else is_same.float().mean() > 0.9
        torch.testing.assert_close(scales.view(2, shape.num_kv_heads, -1)[:, :, slot_ids], expected)
        assert int((scales != 0).sum()) == rows * 2 * shape.num_kv_heads
    assert int((slots != 0).any(-1).sum()) == rows * 2 * shape.num_kv_heads


def check_decode(kernels: AttentionKernels, cache: RandomCache, scoring: Scoring) -> Tensor:
    """Check the last token of each context, and return the attention of all rows."""
    query = cache.query[:, : len(cache.lengths)]
    attended = kernels.paged_decode(query, cache.shape.num_kv_heads, cache.rows(), scoring)
    for row, length in enumerate(cache.lengths):
        if length:
            assert_close(attended[row], attend(query[:, row], cache.context(row), scoring), query.dtype)
    return attended


def check_prefill(kernels: AttentionKernels, cache: RandomCache, starts: list[int], scoring: Scoring) -> None:
    """Check the first, the middle and the last token of each context from its start on."""
    query = cache.query[:, : sum(cache.lengths) - sum(starts)]
    attended = kernels.paged_prefill(query, cache.shape.num_kv_heads, cache.chunks(starts), scoring)
    assert attended is not None
    first = 0
    for sequence, (start, end) in enumerate(zip(starts, cache.lengths, strict=True)):
        for position in {start, (start + end) // 2, end - 1}:
            row, seen = first + position - start, cache.context(sequence)[:, :, : position + 1]
            assert_close(attended[row], attend(query[:, row], seen, scoring), query.dtype)
        first += end - start


def check_nan(kernels: AttentionKernels, dtype: torch.dtype, device: str, *, fp8: bool = False) -> None:
    """Check that a NaN in a context affects its own row only, and one after a context's end none."""
    cache = RandomCache(HeadShape(2, 1, 16), 16, 40, dtype, device, [20, 20, 20], fp8=fp8)
    cache.blocks = [[0, 1], [2, 3], [4, 5]]
    numbers = cache.slots if cache.scales is None else cache.scales[:, None]
    numbers[3 * 16] = float("nan")
    numbers.view(2, 40, 16, -1)[:, 5, 4:] = float("nan")  # left by a former owner
    attended = kernels.paged_decode(cache.query[:, :3], 1, cache.rows(), Scoring(1.0))
    assert attended[[0, 2]].isfinite().all()
    assert attended[1].isnan().all()
