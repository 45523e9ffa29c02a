"""What is sent to vLLM's executor for one step, and what comes back: plain data.

Knows sequences and chunks; imports neither vLLM nor torch, so that the engine can be tested without them.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from engine.grammar import Bits
from engine.sequences.chunk import Chunk, Outcome


@dataclass(frozen=True, slots=True)
class Batch:
    """The chunks that one pass of the model computes."""

    chunks: tuple[Chunk, ...]
    masks: Mapping[str, Bits]  # by sequence id: one bit per token, set if the grammar allows the token next
    lost: frozenset[str]  # sequences whose KV was dropped since they were last computed
    ended: frozenset[str]  # sequences that the executor may forget


class ExecutorDied(Exception):
    """The error of an executor that computes nothing any more."""


class BatchExecutor(Protocol):
    """The executor of batches, one after the other."""

    max_num_seqs: int  # the most chunks of one batch

    def start(self, batch: Batch) -> "Future[dict[str, Outcome]]":
        """Start a batch and return at once.

        Its result is by sequence id; the log probabilities of a prompt come whole, with its last chunk. It has the
        error of an executor that died.
        """
        ...

    def check_alive(self) -> None:
        """Raise `ExecutorDied` if one of its processes has ended."""
        ...

    def close(self) -> None: ...
