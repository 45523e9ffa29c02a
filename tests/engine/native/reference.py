"""What kernels must compute: attention, norms and rotary positions by definition, over a cache of random numbers."""

import random

import torch
from torch import Tensor

from engine.native.attention.kernels import HeadShape, PagedChunks, PagedRows, Scoring
from engine.native.model.layer_kernels import Norm


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x.dtype) * norm.weight


def rotate(heads: Tensor, norm: Norm | None, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate (rows, heads, head_dim) as transformers does."""
    heads = heads if norm is None else rms_norm(heads, norm)
    rotary = cosines.shape[-1]
    turned, rest = heads[..., :rotary].float(), heads[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines[:, None].float() + torch.cat((-second, first), dim=-1) * sines[:, None].float()
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
        self, shape: HeadShape, block_size: int, num_blocks: int, dtype: torch.dtype, device: str, lengths: list[int]
    ) -> None:
        self.shape, self.block_size, self.num_blocks, self.lengths = shape, block_size, num_blocks, lengths
        self.device = device
        generator = torch.Generator().manual_seed(3)
        size = (2 * shape.num_kv_heads * num_blocks * block_size, shape.head_dim)
        self.slots = torch.randn(size, generator=generator).to(device, dtype)
        rng = random.Random(5)
        self.blocks = [rng.sample(range(num_blocks), -(-length // block_size)) for length in lengths]
        # A strided part of wider rows, like the output of a fused projection.
        wide = torch.randn(128, 2 * shape.query_width, generator=generator).to(device, dtype)
        self.query = wide[:, : shape.query_width].unflatten(1, (-1, shape.head_dim)).transpose(0, 1)
        self.sinks = torch.randn(shape.num_query_heads, generator=generator).to(device)

    def context(self, sequence: int) -> Tensor:
        """Return keys and values of a context: (2, kv_heads, length, head_dim), float32."""
        pool = self.slots.view(2, self.shape.num_kv_heads, self.num_blocks, self.block_size, self.shape.head_dim)
        return pool[:, :, self.blocks[sequence]].flatten(2, 3)[:, :, : self.lengths[sequence]].float()

    def rows(self) -> PagedRows:
        """Return the last token of each context."""
        longest = max(map(len, self.blocks))
        table = torch.tensor([own + [0] * (longest - len(own)) for own in self.blocks], device=self.device)
        return PagedRows(self.slots, table, torch.tensor(self.lengths, device=self.device), self.block_size)

    def chunks(self, starts: list[int]) -> PagedChunks:
        """Return the tokens of each context from its start on."""
        counts = [end - start for start, end in zip(starts, self.lengths, strict=True)]
        lines = [(sum(counts[:i]), counts[i], starts[i], sum(map(len, self.blocks[:i]))) for i in range(len(counts))]
        tables = torch.tensor(sum(self.blocks, []), device=self.device)
        return PagedChunks(self.slots, tables, torch.tensor(lines, device=self.device), self.block_size, max(counts))
