"""Learns how long a server's steps take, from the times at which its tokens arrive.

A server with continuous batching gives each running sequence one token a step. So the time between two tokens of one
stream is a step, and the tokens of all streams meanwhile are its work: first tokens stand for prefills, others for
decodes. One stream after the other serves as the reference. Knows request states and times that are passed in.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from engine.step_time.cost import StepWork
from engine.step_time.model import StepTimeModel
from scheduler.request_state import RequestState


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
        self._since_s = 0.0
        self._interval = _Interval()

    def note_tokens(self, state: RequestState, num_new: int, num_prefilled: int, now: float) -> SeenStep | None:
        """Record that a stream brought `num_new` tokens. Return the step that ended with them, if one did.

        `num_prefilled` is the number of tokens that the server had to compute for the stream's first token; 0 for later
        tokens. `state` does not have the new tokens yet.
        """
        self._count(state, num_new, num_prefilled)
        if self._reference is None:
            self._begin(state.id, now)
        elif self._reference == state.id:
            seen = self._end(max(1, num_new), now)
            self._begin(state.id, now)
            return seen
        return None

    def note_alone(self, num_prefilled: int, elapsed_s: float) -> None:
        """Record the time of a first token that the server computed with nothing beside it."""
        work = StepWork()
        work.add(num_prefilled, 0)
        self.model.observe(work, elapsed_s)

    def forget(self, request_id: str) -> None:
        """End the use of a stream as the reference, because it has ended."""
        if self._reference == request_id:
            self._reference = None

    def _begin(self, request_id: str, now: float) -> None:
        self._reference, self._since_s, self._interval = request_id, now, _Interval()

    def _count(self, state: RequestState, num_new: int, num_prefilled: int) -> None:
        interval, cost = self._interval, self.model.cost()
        context = state.num_tokens
        if num_prefilled:
            interval.work.add(num_prefilled, 0)
            interval.runs_s[state.tier.name] += cost.run(num_prefilled, 0)
        else:
            for position in range(num_new):
                interval.work.add(1, context + position)
            interval.runs_s[state.tier.name] += num_new * cost.decode(context)
        interval.sequences[state.tier.name] += 1

    def _end(self, num_steps: int, now: float) -> SeenStep | None:
        """Return the step that ends now; None if several steps came at once, whose lengths are not known."""
        interval, elapsed_s = self._interval, now - self._since_s
        if num_steps > 1 or elapsed_s <= 0:
            return None
        predicted_s = self.model.predict(interval.work)
        self.model.observe(interval.work, elapsed_s)
        total_s = sum(interval.runs_s.values()) or 1.0
        used_s = {tier: elapsed_s * run_s / total_s for tier, run_s in interval.runs_s.items()}
        return SeenStep(elapsed_s, predicted_s, dict(interval.sequences), used_s)
