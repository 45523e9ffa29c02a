"""The sizes of steps for which graphs are captured: numbers of decodes, alone or beside tokens of prefill chunks.

Knows numbers only; does not know graphs, tensors or the model.
"""

from typing import NamedTuple

from engine.interface import EngineInfo, blocks_for

_MAX_DECODES = 512  # decodes of the largest graph
_MAX_CHUNKS = 32  # prefill chunks of a graph
# Sizes of the graphs with prefill chunks. Launching the kernels of a longer step one by one takes the host a smaller
# share of the step's time.
_PREFILL_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
_DECODES_BESIDE = (16, 64, 128, 256, 512)


class GraphSize(NamedTuple):
    """The rows of a graph: decodes, and tokens of prefill chunks."""

    decodes: int
    prefill: int = 0

    @property
    def num_chunks(self) -> int:
        """The number of prefill chunks that the graph has room for."""
        return min(_MAX_CHUNKS, self.prefill // 2)  # a chunk has at least two tokens

    def blocks_for_trial(self, block_size: int) -> int:
        """The number of KV blocks that `StepGraphs.capture` needs: one for each decode, and those of two chunks."""
        return self.decodes + 2 * blocks_for(-(-self.prefill // 2), block_size)

    def fits(self, info: EngineInfo) -> bool:
        """Return whether the engine has the KV blocks and the context that `StepGraphs.capture` needs."""
        return self.prefill <= info.max_model_len and self.blocks_for_trial(info.block_size) <= info.num_blocks


def graph_sizes(max_decodes: int, max_tokens: int) -> list[GraphSize]:
    """Return the sizes of the graphs to capture, in the order in which they are captured.

    `max_decodes` and `max_tokens` are the most decodes and the most tokens of a step. The largest graph of decodes has
    `max_decodes`, but at most `_MAX_DECODES`. Padding adds less than 8 decodes up to 256, and less than 32 above.
    Beside a prefill, whose step takes longer, it may double the decodes, also beyond `max_tokens`.

    The largest graph comes first: it fits every step of decodes, and the smaller graphs reuse its memory. Then come
    powers of 2, with which padding at most doubles a step, the graphs for prefills, and all other sizes.
    """
    most = min(max_decodes, _MAX_DECODES)
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, _MAX_DECODES, 32)) if size < most] + [most]
    beside = sorted({min(size, most) for size in _DECODES_BESIDE})
    mixed = [GraphSize(d, p) for p in reversed(_PREFILL_TOKENS) for d in reversed(beside) if p <= max_tokens]
    coarse = [size for size in sizes if size == most or size & (size - 1) == 0]
    others = [size for size in sizes if size not in coarse]
    return [*map(GraphSize, reversed(coarse)), *mixed, *map(GraphSize, reversed(others))]
