"""The interface between paged attention and a backend's kernels: the calls and the types of their arguments.

Knows heads, rows, blocks and scores; does not know layers, steps or any backend.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The number and size of a layer's attention heads.

    A width is the number of elements of one row in which all heads are concatenated.
    """

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
    """The parameters with which a layer turns the products of queries and keys into attention weights."""

    scaling: float  # factor of each product of a query and a key
    softcap: float | None = None  # scores become softcap · tanh(score / softcap) (Gemma 2); None: unchanged
    window: int | None = None  # number of tokens that a row attends to, itself included; None: all
    sinks: Tensor | None = None  # (heads,): one additional score per head in the softmax, without a value (gpt-oss)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """One layer's KV cache, and the blocks that hold the contexts of some decode rows.

    A row whose context length is 0 is padding.
    """

    slots: Tensor  # (2 × kv_heads × slots, head_dim), the model's dtype or codes of FP8: all keys, then all values
    block_table: Tensor  # (rows, blocks), int64: block ids of each row's context
    context_lens: Tensor  # (rows,), int64: tokens in each row's context
    block_size: int  # tokens per block
    scales: Tensor | None = None  # as in `LayerCache`


@dataclass(frozen=True, slots=True)
class PagedChunks:
    """One layer's KV cache and some prefill chunks, whose own keys and values are already in the cache.

    Each row of `extents` describes a chunk: its first row among the queries, its number of tokens, the position of its
    first token, and the index in `block_tables` at which its block table begins.
    """

    slots: Tensor  # (2 × kv_heads × slots, head_dim), the model's dtype or codes of FP8: all keys, then all values
    block_tables: Tensor  # (sum of all chunks' blocks,), int64: the chunks' block tables end to end
    extents: Tensor  # (chunks, 4), int64
    block_size: int  # tokens per block
    longest: int  # number of tokens of the longest chunk
    num_single: int = 0  # the first chunks, which have at most one token each
    scales: Tensor | None = None  # as in `LayerCache`


class AttentionKernels(Protocol):
    """A backend's attention kernels.

    Queries are (heads, rows, head_dim), contiguous in the last dimension; results are (rows, heads, head_dim) in the
    queries' dtype. No call waits for the device.
    """

    def can_attend(self, shape: HeadShape) -> bool:
        """Return whether the kernels support layers of this shape. The other methods need a supported shape."""
        ...

    def paged_decode(self, query: Tensor, num_kv_heads: int, paged: PagedRows, scoring: Scoring) -> Tensor:
        """Return the attention of each row to its own context.

        The result of a row of context length 0 is undefined.
        """
        ...

    def paged_prefill(self, query: Tensor, num_kv_heads: int, chunks: PagedChunks, scoring: Scoring) -> Tensor | None:
        """Return the attention of each row of a chunk to the tokens of its sequence up to the row's own position.

        Return None if there is no prefill kernel for this head size.
        """
        ...
