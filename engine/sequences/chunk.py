"""A piece of one sequence that a step computes, and what comes of it.

Knows sequences and results; does not know blocks, plans or other sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.interface import FinishReason, SequenceOutput, TokenLogprobs
from engine.sequences.sequence import Sequence

_NONE_SCORED = range(0)


@dataclass(slots=True, eq=False)
class Chunk:
    """A `Run` whose blocks are allocated: the tokens `start … end - 1` of `sequence`. Nothing in it changes."""

    sequence: Sequence
    start: int
    num_tokens: int
    unfilled_block: int | None = None  # a newly allocated block with slots that the chunk does not write
    num_cached: int = 0  # tokens before `start` that this step took from the prefix cache
    draft: tuple[int, ...] = ()  # tokens that may follow the last known one; computed as well
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """True if the chunk computes the last known token of the sequence, so that a new token is sampled."""
        return self.end == self.sequence.num_tokens

    @property
    def scored(self) -> range:
        """The positions of the prompt tokens whose log probabilities this chunk gives.

        These tokens follow a token of the chunk, and were not reported yet.
        """
        sequence = self.sequence
        if sequence.sampling.prompt_logprobs is None:
            return _NONE_SCORED
        return range(max(self.start + 1, sequence.num_scored_tokens), min(self.end + 1, sequence.num_prompt_tokens))

    def num_computed(self, token_ids: tuple[int, ...]) -> int:
        """Return how many tokens of the sequence are computed when the chunk has sampled `token_ids`.

        All of them but the last are tokens of the draft.
        """
        return self.end + max(0, len(token_ids) - 1)

    def verified(self, rows: Iterable["Outcome"]) -> "Outcome":
        """Return the outcome of the chunk, which samples a token after its last token and after each of its draft.

        The tokens of `rows` count up to the first one that the draft does not have, or that ends the sequence: the rows
        after it were computed from another text. A row that failed is computed again in the next step, without a draft
        before it, unless it is the first.
        """
        rows = iter(rows)
        found = next(rows)
        for drafted, row in zip(self.draft, rows, strict=True):
            is_end = drafted in self.sequence.stop_ids
            if found.token_ids[-1:] != (drafted,) or is_end or row.failure is not None:
                break
            found = Outcome(found.token_ids + row.token_ids, found.logprobs + row.logprobs)
        return found


@dataclass(slots=True)
class Outcome:
    """The result of one chunk. Nothing in it changes."""

    token_ids: tuple[int, ...] = ()  # the new token, if the chunk samples one; several if its draft was right
    logprobs: tuple[TokenLogprobs, ...] = ()  # one entry for each new token, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one for each prompt token that the chunk scores
    failure: str | None = None  # the reason why the sequence cannot continue
    vector: bytes = b""  # of a model that is no chat

    @property
    def token_id(self) -> int | None:
        """The new token of a chunk without a draft."""
        return self.token_ids[0] if self.token_ids else None

    @property
    def is_computed(self) -> bool:
        return self.failure is None

    def then(self, later: "Outcome") -> "Outcome":
        """Return the combined result of two pieces of one chunk.

        `self` is the result of the first piece, which samples no token; `later` is the result of the second. If `later`
        failed, it is returned.
        """
        if not later.is_computed:
            return later
        return Outcome(later.token_ids, later.logprobs, self.prompt_logprobs + later.prompt_logprobs)


def output_of(chunk: Chunk, outcome: Outcome, reason: FinishReason | None) -> SequenceOutput:
    """Return what the step's result says of a computed chunk, after which its sequence is finished for `reason`."""
    return SequenceOutput(
        seq_id=chunk.sequence.seq_id,
        num_computed_tokens=chunk.num_computed(outcome.token_ids),
        token_ids=outcome.token_ids,
        finish_reason=reason,
        num_cached_tokens=chunk.num_cached,
        logprobs=outcome.logprobs,
        prompt_logprobs=outcome.prompt_logprobs,
        vector=outcome.vector,
    )
