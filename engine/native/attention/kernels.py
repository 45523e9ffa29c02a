"""What paged attention asks of a backend's kernels, and the shapes it asks in.

Knows heads, rows, blocks and scores; not layers, not steps, and no backend.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_width(self) -> int:
        return self.num_query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into weights."""

    scaling: float
    softcap: float | None = None  # scores are squashed into ± softcap (Gemma 2)
    window: int | None = None  # how many tokens a row sees, itself included; None: all
    sinks: Tensor | None = None  # (heads,): a score of nothing, that takes its share of the softmax (gpt-oss)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """One layer's cache, (2 × kv_heads × slots, head_dim), and where the contexts of some rows lie in it:
    `block_table` (rows, blocks) and `context_lens` (rows,), int64. A row of length 0 stands for none."""

    slots: Tensor
    block_table: Tensor
    context_lens: Tensor
    block_size: int


@dataclass(frozen=True, slots=True)
class PagedChunks:
    """One layer's cache and some prefill chunks, whose own keys and values it holds already.

    `block_tables`: those of all chunks end to end. `extents` (chunks, 4), int64: the chunk's first row among the
    queries, its number of tokens, the position of the first of them, and where its block table begins.
    """

    slots: Tensor
    block_tables: Tensor
    extents: Tensor
    block_size: int
    longest: int  # most tokens of one chunk


class AttentionKernels(Protocol):
    """Queries come as (heads, rows, head_dim), contiguous in their last dimension; results are (rows, heads,
    head_dim). Nothing waits for the device."""

    def can_attend(self, shape: HeadShape) -> bool:
        """Whether there are kernels for layers of this shape; nothing else is asked of the others."""
        ...

    def paged_decode(self, query: Tensor, num_kv_heads: int, paged: PagedRows, scoring: Scoring) -> Tensor:
        """Each row against a context of its own. Rows of length 0 come out as numbers without meaning, or zeros."""
        ...

    def paged_prefill(self, query: Tensor, num_kv_heads: int, chunks: PagedChunks, scoring: Scoring) -> Tensor | None:
        """The rows of each chunk against its context and, causally, each other. None: there is no such kernel."""
        ...
