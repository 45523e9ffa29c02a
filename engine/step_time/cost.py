"""The cost of a step: the features of its work, and the formula that computes seconds from these features.

    step time = max(min_step_s, step_s + prefill_token_s·P + attend_s·A + context_token_s·C + decode_s·D)

| feature of the work | unit | its coefficient | unit |
|---|---|---|---|
| 1: every step | – | `step_s` | s |
| P: tokens of prefill chunks | tokens | `prefill_token_s` | s a token |
| A: Σ p·(c + p/2) over chunks of p tokens after c computed tokens | pairs of tokens | `attend_s` | s a pair |
| C: Σ c over decodes with c computed tokens | tokens | `context_token_s` | s a token |
| D: decodes | decodes | `decode_s` | s a decode |

The time is a sum over the runs of a step, so a planner adds a run to a step in O(1). This module knows numbers only; it
does not know torch, tiers or clocks.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class StepWork:
    """The features of one step, added up while a plan is made."""

    prefill_tokens: int = 0  # P
    attended: float = 0.0  # A
    context_tokens: int = 0  # C
    decodes: int = 0  # D
    prefills: int = 0  # prefill chunks

    def add(self, num_tokens: int, context: int, num_drafted: int = 0) -> None:
        """Add a run of `num_tokens` tokens that follow `context` computed tokens.

        A run of one token is a decode; a longer run is a prefill chunk. A decode with a draft of `num_drafted` tokens
        is computed as so many more decodes.
        """
        if num_tokens == 1:
            count = 1 + num_drafted
            self.decodes += count
            self.context_tokens += count * context + num_drafted * count // 2
        else:
            self.prefills += 1
            self.prefill_tokens += num_tokens
            self.attended += attended_pairs(num_tokens, context)

    @property
    def rows(self) -> int:
        """The number of tokens that the step computes."""
        return self.prefill_tokens + self.decodes

    @property
    def is_mixed(self) -> bool:
        """True if the step holds a prefill chunk, even if it holds no decode."""
        return self.prefills > 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """The coefficients of the formula at one moment. All methods return seconds."""

    step_s: float = 0.004
    prefill_token_s: float = 0.0002
    attend_s: float = 0.0
    context_token_s: float = 0.0
    decode_s: float = 0.0002
    min_step_s: float = 0.0  # no step is shorter, however little work it holds
    slowdown: float = 1.0  # how many times as long as usually all steps take now; the coefficients include it

    def prefill(self, num_tokens: int, context: int) -> float:
        """Return the cost of a prefill chunk of `num_tokens` tokens that follow `context` computed tokens."""
        return self.prefill_token_s * num_tokens + self.attend_s * attended_pairs(num_tokens, context)

    def decode(self, context: int) -> float:
        """Return the cost of a decode: one token that follows `context` computed tokens."""
        return self.decode_s + self.context_token_s * context

    def run(self, num_tokens: int, context: int, num_drafted: int = 0) -> float:
        """Return the cost of one run: a decode if `num_tokens` is 1, otherwise a prefill chunk.

        A decode may have a draft of `num_drafted` tokens.
        """
        if num_drafted:
            return (1 + num_drafted) * (self.decode_s + self.context_token_s * (context + num_drafted / 2))
        return self.decode(context) if num_tokens == 1 else self.prefill(num_tokens, context)

    def step(self, work_s: float) -> float:
        """Return the time of a whole step whose runs cost `work_s` seconds in total."""
        return max(self.min_step_s, self.step_s + work_s)

    def runs(self, work: StepWork) -> float:
        """Return the cost of all runs of a step with the features `work`."""
        prefills = self.prefill_token_s * work.prefill_tokens + self.attend_s * work.attended
        return prefills + self.decode_s * work.decodes + self.context_token_s * work.context_tokens

    def of(self, work: StepWork) -> float:
        """Return the time of a whole step with the features `work`."""
        return self.step(self.runs(work))


def attended_pairs(num_tokens: int, context: int) -> float:
    """Return the number of pairs of tokens in the attention of a prefill chunk.

    Each token of the chunk attends to the context and, on average, to half of the chunk.
    """
    return num_tokens * (context + num_tokens / 2)
