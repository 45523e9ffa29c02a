"""Learns how long a server's steps take, from the times at which its tokens arrive.

A server with continuous batching gives each running sequence one token a step. So the tokens of a step arrive in one
burst, the time from one burst to the next is a step, and the tokens of the second burst are its work: first tokens
stand for prefills, others for decodes. Knows request states and times that are passed in.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.ewma import Ewma
from engine.step_time.model import StepTimeModel
from scheduler.control.delay_account import InteractiveRun
from scheduler.request_state import RequestState

# The longest pause within a burst: this share of the time since the burst before it, and at most this long. If a stream
# brings another token before this time is over, several steps came at once.
PAUSE_SHARE = 0.25
MAX_PAUSE_S = 0.02
PREFILL_WEIGHT = 0.02  # weight of a new step with prefills in the usual time of a prompt's token


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step of the server, as far as it can be seen from outside."""

    elapsed_s: float
    predicted_s: float
    sequences: dict[str, int]  # number of sequences, by tier
    runs: list[InteractiveRun]
    num_decodes: int  # 0 if it computed prompts, too
    used_s: dict[str, float]  # the tiers' parts of `elapsed_s`, in proportion to predicted costs


@dataclass(slots=True)
class _Burst:
    """The tokens of one step."""

    begun_s: float
    newest_s: float
    max_pause_s: float = MAX_PAUSE_S
    streams: set[str] = field(default_factory=set)
    follows: bool = False  # a stream that brought tokens in the burst before brings one more: one step has passed
    has_several: bool = False  # steps that came at once
    work: StepWork = field(default_factory=StepWork)
    runs: list[InteractiveRun] = field(default_factory=list)
    sequences: Counter[str] = field(default_factory=Counter)
    runs_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class UpstreamStepTimes:
    """The step-time model of a server that is only seen from outside."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model
        # Of steps with prefills, as shares of their time: the time beyond their decodes, and the tokens of prompts.
        self._beyond_decodes = Ewma(PREFILL_WEIGHT)
        self._prompts = Ewma(PREFILL_WEIGHT)
        self._before: _Burst | None = None
        self._burst: _Burst | None = None

    def cost(self) -> StepCost:
        """Return the present costs: those of steps that only decode, and that of a prompt's token.

        A prompt's token costs what steps with prefills take beyond their decodes, divided by the number of such tokens.
        That includes what any prefill adds to a step: prompts of similar lengths do not show how much it is.
        """
        cost = self.model.cost(mixed=False)
        if not self._prompts.value:
            return cost
        prefill_token_s = max(0.0, self._beyond_decodes.value / self._prompts.value)
        return replace(cost, prefill_token_s=prefill_token_s, attend_s=0.0)

    def note_tokens(self, state: RequestState, num_new: int, num_prefilled: int, now: float) -> SeenStep | None:
        """Record that a stream brought `num_new` tokens. Return the step before them, if one is complete now.

        `num_prefilled` is the number of tokens that the server had to compute for the stream's first token; 0 for later
        tokens. `state` does not have the new tokens yet.
        """
        seen, burst = None, self._burst
        if burst is None or self._is_over(burst, state, now):
            seen = self._finish()
            burst = self._burst = _Burst(now, now)
            if self._before is not None:
                burst.max_pause_s = min(MAX_PAUSE_S, PAUSE_SHARE * (now - self._before.begun_s))
        self._count(burst, state, num_new, num_prefilled)
        burst.newest_s = now
        return seen

    def _is_over(self, burst: _Burst, state: RequestState, now: float) -> bool:
        """Return whether a token that a stream brings now begins another burst."""
        since_s = burst.begun_s if state.id in burst.streams else burst.newest_s
        return now - since_s > burst.max_pause_s

    def note_alone(self, num_prefilled: int, elapsed_s: float) -> None:
        """Record the time of a first token that the server computed with nothing beside it."""
        work = StepWork()
        work.add(num_prefilled, 0)
        self._observe(work, elapsed_s)

    def _observe(self, work: StepWork, elapsed_s: float) -> None:
        if work.is_mixed and elapsed_s > 0:
            decodes_s = self.model.predict(StepWork(context_tokens=work.context_tokens, decodes=work.decodes))
            self._beyond_decodes.add((elapsed_s - decodes_s) / elapsed_s)
            self._prompts.add(work.prefill_tokens / elapsed_s)
        self.model.observe(work, elapsed_s)

    def _count(self, burst: _Burst, state: RequestState, num_new: int, num_prefilled: int) -> None:
        cost, context = self.cost(), state.num_tokens
        if num_prefilled:
            burst.work.add(num_prefilled, 0)
            burst.runs_s[state.tier.name] += cost.run(num_prefilled, 0)
        else:
            for position in range(num_new):
                burst.work.add(1, context + position)
            burst.runs_s[state.tier.name] += num_new * cost.decode(context)
            if num_new == 1 and self._before is not None and state.id in self._before.streams:
                burst.follows = True
        if state.tier.is_interactive:
            burst.runs.append((state, num_prefilled or num_new, 0 if num_prefilled else context))
        burst.has_several |= state.id in burst.streams
        burst.sequences[state.tier.name] += 1
        burst.streams.add(state.id)

    def _finish(self) -> SeenStep | None:
        """End the burst. Return its step; None if the time of one step is not known, as after a pause of the server."""
        burst, before = self._burst, self._before
        self._before = burst
        if burst is None or before is None or not burst.follows or burst.has_several or before.has_several:
            return None
        elapsed_s = burst.begun_s - before.begun_s
        predicted_s = self.model.predict(burst.work)
        self._observe(burst.work, elapsed_s)
        total_s = sum(burst.runs_s.values()) or 1.0
        used_s = {tier: elapsed_s * run_s / total_s for tier, run_s in burst.runs_s.items()}
        num_decodes = 0 if burst.work.is_mixed else burst.work.decodes
        return SeenStep(elapsed_s, predicted_s, dict(burst.sequences), burst.runs, num_decodes, used_s)
