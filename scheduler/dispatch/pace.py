"""Learns how long a server's steps take, from the times at which its tokens arrive.

A server with continuous batching gives each running sequence one token a step. So the time between two tokens of one
stream is a step, and the tokens of all streams meanwhile are its work: first tokens stand for prefills, others for
decodes. One stream after the other serves as the reference. Knows request states and times that are passed in.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.model import StepTimeModel
from scheduler.clock import NEVER_S
from scheduler.request_state import RequestState

# Share of the shortest step's length: tokens that come within this time after the reference's token are of its step.
SAME_STEP_SHARE = 0.25
MAX_SAME_STEP_S = 0.02  # length of a step, as long as none is known
SHORTEST_GROWTH = 1.01  # factor by which each step raises the shortest length, so that one that is over is forgotten


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step of the server, as far as it can be seen from outside."""

    elapsed_s: float
    predicted_s: float
    sequences: dict[str, int]  # number of sequences, by tier
    used_s: dict[str, float]  # the tiers' parts of `elapsed_s`, in proportion to predicted costs


@dataclass(slots=True)
class _Interval:
    """The tokens that arrived since the reference's last token."""

    work: StepWork = field(default_factory=StepWork)
    sequences: Counter[str] = field(default_factory=Counter)
    runs_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class UpstreamPace:
    """The step-time model of a server that is only seen from outside."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model
        self._reference: str | None = None
        self._since_s = 0.0  # the reference's token with which the interval began
        self._ended_s: float | None = None  # its next token; other tokens of the same step may still come
        self._num_new = 0  # number of tokens that the reference brought then
        self._counts_from_s = -NEVER_S
        self._shortest_s = NEVER_S  # length of the shortest step seen lately
        self._interval = _Interval()

    def cost(self) -> StepCost:
        """Return the present costs: of prefills as in mixed steps, of all else as in steps that only decode.

        Mixed steps say little about decodes, whose part in them is small beside that of the prefills.
        """
        mixed = self.model.cost()
        decodes = self.model.cost(mixed=False)
        return replace(decodes, prefill_token_s=mixed.prefill_token_s, attend_s=mixed.attend_s)

    def note_tokens(self, state: RequestState, num_new: int, num_prefilled: int, now: float) -> SeenStep | None:
        """Record that a stream brought `num_new` tokens. Return the step before them, if one is complete now.

        `num_prefilled` is the number of tokens that the server had to compute for the stream's first token; 0 for later
        tokens. `state` does not have the new tokens yet.
        """
        seen = self._finish() if self._is_over(now) else None
        if self._reference is None and self._ended_s is None:
            self._reference, self._since_s, self._interval = state.id, now, _Interval()
            self._counts_from_s = now + SAME_STEP_SHARE * min(self._shortest_s, MAX_SAME_STEP_S)
            return seen
        if now >= self._counts_from_s:  # tokens before are of the step that ended with the first token of the reference
            self._count(state, num_new, num_prefilled)
        if self._reference == state.id:
            self._num_new += num_new
            self._ended_s = now
        return seen

    def note_alone(self, num_prefilled: int, elapsed_s: float) -> None:
        """Record the time of a first token that the server computed with nothing beside it."""
        work = StepWork()
        work.add(num_prefilled, 0)
        self.model.observe(work, elapsed_s)

    def forget(self, request_id: str) -> None:
        """End the use of a stream as the reference, because it has ended."""
        if self._reference == request_id:
            self._reference = None

    def _is_over(self, now: float) -> bool:
        """Return whether a token that comes now is of a later step than the reference's newest token."""
        if self._ended_s is None:
            return False
        return now - self._ended_s > SAME_STEP_SHARE * min(self._shortest_s, self._ended_s - self._since_s)

    def _count(self, state: RequestState, num_new: int, num_prefilled: int) -> None:
        interval, cost = self._interval, self.cost()
        context = state.num_tokens
        if num_prefilled:
            interval.work.add(num_prefilled, 0)
            interval.runs_s[state.tier.name] += cost.run(num_prefilled, 0)
        else:
            for position in range(num_new):
                interval.work.add(1, context + position)
            interval.runs_s[state.tier.name] += num_new * cost.decode(context)
        interval.sequences[state.tier.name] += 1

    def _finish(self) -> SeenStep | None:
        """End the interval. Return its step; None if several steps came at once, whose lengths are not known."""
        assert self._ended_s is not None
        interval, elapsed_s, num_new = self._interval, self._ended_s - self._since_s, self._num_new
        self._since_s, self._ended_s, self._num_new, self._interval = self._ended_s, None, 0, _Interval()
        if num_new > 1 or elapsed_s <= 0:
            return None
        self._shortest_s = min(elapsed_s, SHORTEST_GROWTH * self._shortest_s)
        predicted_s = self.model.predict(interval.work)
        self.model.observe(interval.work, elapsed_s)
        total_s = sum(interval.runs_s.values()) or 1.0
        used_s = {tier: elapsed_s * run_s / total_s for tier, run_s in interval.runs_s.items()}
        return SeenStep(elapsed_s, predicted_s, dict(interval.sequences), used_s)
