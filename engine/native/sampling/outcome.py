"""What computing one chunk came to. Plain data, between the forward pass and the table of sequences."""

from dataclasses import dataclass

from engine.interface import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a chunk came to. `token_id`: the new token, if the chunk samples one. `failure`: why its sequence cannot go
    on. `is_evicted`: the sequence left the step and is as it was before it; then no other field counts."""

    token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    failure: str | None = None
    is_evicted: bool = False

    @property
    def is_computed(self) -> bool:
        return self.failure is None and not self.is_evicted

    def then(self, later: "Outcome") -> "Outcome":
        """Of two pieces of one chunk, the earlier of which samples nothing."""
        if not later.is_computed:
            return later
        return Outcome(later.token_id, later.logprobs, self.prompt_logprobs + later.prompt_logprobs)
