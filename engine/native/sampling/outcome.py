"""The result of computing one chunk, as plain data that the table of sequences can read."""

from dataclasses import dataclass

from engine.interface import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one chunk.

    If `is_evicted` is true, the sequence stays as it was before the step, and no other field is set.
    """

    token_id: int | None = None  # the new token, if the chunk samples one
    logprobs: tuple[TokenLogprobs, ...] = ()  # one entry, for the new token, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one for each prompt token that the chunk scores
    failure: str | None = None  # the reason why the sequence cannot continue
    is_evicted: bool = False  # whether the sequence was evicted from the running step

    @property
    def is_computed(self) -> bool:
        return self.failure is None and not self.is_evicted

    def then(self, later: "Outcome") -> "Outcome":
        """Return the combined result of two pieces of one chunk.

        `self` is the result of the first piece, which samples no token; `later` is the result of the second. If `later`
        failed or was evicted, `later` is returned.
        """
        if not later.is_computed:
            return later
        return Outcome(later.token_id, later.logprobs, self.prompt_logprobs + later.prompt_logprobs)
