"""One sequence as the engine sees it: tokens, how many of them are computed, and where their KV lies.

Knows when a sequence is finished; not how tokens are computed, nor who else is in the batch. The owner of all
of them is the `SequenceTable`.
"""

from array import array
from enum import Enum

from engine.interface import FinishReason, NewSequence


class SequenceStatus(Enum):
    ACTIVE = "active"  # may be run
    PAUSED = "paused"  # KV resident; may not be run until resumed
    EVICTED = "evicted"  # KV freed, to be recomputed; may not be run until resumed


class Sequence:
    """Mutable; written by `SequenceTable` only. Prompt and output are one list of known tokens, of which the
    first `num_computed_tokens` have their KV in `block_table`."""

    __slots__ = (
        "seq_id",
        "sampling",
        "token_ids",
        "num_prompt_tokens",
        "num_computed_tokens",
        "block_table",
        "status",
        "_stop_ids",
        "_max_tokens_total",
    )

    def __init__(self, new: NewSequence, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        self.seq_id = new.seq_id
        self.sampling = new.sampling
        # Arrays, so that a step's metadata is made of memory copies, not of Python loops over tokens.
        self.token_ids = array("q", new.prompt_token_ids)
        self.num_prompt_tokens = len(new.prompt_token_ids)
        self.num_computed_tokens = 0
        self.block_table = array("q")
        self.status = SequenceStatus.ACTIVE
        eos = () if new.sampling.ignore_eos else eos_token_ids
        self._stop_ids = frozenset(new.sampling.stop_token_ids).union(eos)
        self._max_tokens_total = min(max_model_len, self.num_prompt_tokens + new.sampling.max_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token; say whether, and why, it was the last."""
        self.token_ids.append(token_id)
        if token_id in self._stop_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self._max_tokens_total:
            return FinishReason.LENGTH
        return None
