"""A piece of one sequence that a step computes, and what comes of it.

Knows sequences and results; does not know blocks, plans or other sequences.
"""

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


@dataclass(slots=True)
class Outcome:
    """The result of one chunk. Nothing in it changes."""

    token_id: int | None = None  # the new token, if the chunk samples one
    logprobs: tuple[TokenLogprobs, ...] = ()  # one entry, for the new token, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one for each prompt token that the chunk scores
    failure: str | None = None  # the reason why the sequence cannot continue
    vector: bytes = b""  # of a model that is no chat

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
        return Outcome(later.token_id, later.logprobs, self.prompt_logprobs + later.prompt_logprobs)


def output_of(chunk: Chunk, outcome: Outcome, reason: FinishReason | None) -> SequenceOutput:
    """Return what the step's result says of a computed chunk, after which its sequence is finished for `reason`."""
    return SequenceOutput(
        seq_id=chunk.sequence.seq_id,
        num_computed_tokens=chunk.end,
        token_ids=() if outcome.token_id is None else (outcome.token_id,),
        finish_reason=reason,
        num_cached_tokens=chunk.num_cached,
        logprobs=outcome.logprobs,
        prompt_logprobs=outcome.prompt_logprobs,
        vector=outcome.vector,
    )
