"""One sequence of an engine: its tokens, how many of them are computed, and which blocks hold their KV.

Knows when a sequence is finished; does not know how tokens are computed, or which other sequences are in the batch. The
`SequenceTable` owns all sequences.
"""

from array import array
from enum import Enum

from engine.interface import FinishReason, NewSequence
from engine.sequences.prefix_cache import block_digest, root_digest


class SequenceStatus(Enum):
    ACTIVE = "active"  # may be run
    PAUSED = "paused"  # KV on the device; may not be run until resumed
    SWAPPED = "swapped"  # KV in host memory; may not be run until resumed
    TO_RECOMPUTE = "to be recomputed"  # KV freed; may not be run until resumed


class Sequence:
    """The tokens and blocks of one sequence. Only `SequenceTable` modifies it.

    Prompt and output are one list of known tokens. The first `num_computed_tokens` of them have their KV in
    `block_table`, or in `swap_table` while the sequence is swapped.
    """

    __slots__ = (
        "seq_id",
        "sampling",
        "compiled_grammar",
        "retention",
        "second_from",
        "token_ids",
        "num_prompt_tokens",
        "num_given_tokens",
        "num_computed_tokens",
        "block_table",
        "swap_table",
        "num_known_blocks",
        "status",
        "alters_logits",
        "num_scored_tokens",
        "stop_ids",
        "_cache_salt",
        "_digests",
        "_max_tokens_total",
        "__weakref__",
    )

    def __init__(self, new: NewSequence, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        self.seq_id = new.seq_id
        self.sampling = new.sampling
        self.compiled_grammar = new.compiled_grammar
        self.retention = new.retention
        self.second_from = new.second_from
        # Arrays, so that a step is packed by copying memory, not by Python loops over tokens.
        self.token_ids = array("q", new.prompt_token_ids)
        self.token_ids.extend(new.output_token_ids)
        self.num_prompt_tokens = len(new.prompt_token_ids)
        self.num_given_tokens = len(self.token_ids)  # prompt, and output that another engine has sampled
        self.num_computed_tokens = 0
        self.block_table = array("q")
        self.swap_table: list[int] = []  # blocks of host memory
        self.num_known_blocks = 0  # first blocks of `block_table` that are known to the prefix cache
        self.status = SequenceStatus.ACTIVE
        # An adapter changes keys and values, so its sequences share no blocks with others.
        adapter = new.sampling.adapter
        self._cache_salt = new.cache_salt if adapter is None else f"{adapter!r} {new.cache_salt}"
        self._digests: list[bytes] = []
        self.alters_logits = new.sampling.alters_logits
        self.num_scored_tokens = 1  # prompt tokens already reported; the first one has nothing to report
        # A grammar ends with an end-of-sequence token, and no token can follow this token, even with `ignore_eos`.
        eos = () if new.sampling.ignore_eos and new.sampling.grammar is None else eos_token_ids
        self.stop_ids = frozenset(new.sampling.stop_token_ids).union(eos)
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

    @property
    def num_tokens_left(self) -> int:
        """The number of tokens that the sequence may still sample."""
        return self._max_tokens_total - len(self.token_ids)

    def digests(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the digests of at least the first `num_blocks` blocks, which must be full of known tokens.

        Each digest is computed only once.
        """
        known = self._digests
        for i in range(len(known), num_blocks):
            parent = known[-1] if known else root_digest(self._cache_salt)
            known.append(block_digest(parent, self.token_ids[i * block_size : (i + 1) * block_size]))
        return known

    def append(self, token_id: int) -> FinishReason | None:
        """Append a sampled token. Return why the sequence is finished; None if the sequence continues."""
        self.token_ids.append(token_id)
        return self._finish_reason(len(self.token_ids) - 1)

    def replace_placeholder(self, index: int, token_id: int) -> FinishReason | None:
        """Replace the placeholder at `index` by the real token.

        Return why the sequence is finished; None if the sequence continues.
        """
        self.token_ids[index] = token_id
        return self._finish_reason(index)

    def _finish_reason(self, index: int) -> FinishReason | None:
        if self.token_ids[index] in self.stop_ids:
            return FinishReason.STOP
        if index + 1 >= self._max_tokens_total:
            return FinishReason.LENGTH
        return None
