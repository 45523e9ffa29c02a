"""The slowdown that bulk causes, measured: in short slots at random times no bulk runs, and the rest is compared.

Since chance alone chooses the slots, they show what the same requests take without bulk, whatever the delay accounts
predict. A slot counts from its begin, or from the end of the step with bulk that ran then. Two ratios are formed for
each interactive tier:

| ratio | outside ÷ in slots |
|---|---|
| first tokens | mean time to first token, by the time of arrival; a slot lasts until the first tokens of its arrivals |
| answers | time of steps ÷ their predicted time without bulk, summed over the requests that are present in each step |

An answer lasts longer than a slot, so its steps are compared. The prediction makes steps of different work comparable;
its errors are in both parts of the ratio, and cancel. As in the delay accounts, the work of other interactive requests
is left out: whoever is slowed down meets more of them, in the same proportion.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from engine.step_time.model import StepTimeModel
from scheduler.clock import NEVER_S
from scheduler.control.delay_account import InteractiveRun, step_work
from scheduler.control.windows import MIN_SAMPLES
from scheduler.request_state import RequestState

SLOT_S = 0.5  # seconds of a slot that count
MAX_SLOT_S = 2.5  # seconds after which bulk runs again even if a request of the slot awaits its first token
SHARE = 0.02  # of the time that slots take
ROUNDS = 360  # a round is a slot and the time before it; so many of the newest are compared: about three hours
DEVIATIONS = 1.96  # standard deviations of a normal distribution that hold 95 % of it


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long something takes because of bulk, with the interval that holds the truth in 95 % of cases.

    `slots` is the number of slots that tell it.
    """

    value: float
    low: float
    high: float
    slots: int


class Comparison:
    """The ratio of two means, outside ÷ in slots. A mean is a sum of times ÷ a sum of work."""

    def __init__(self) -> None:
        self._open = [0.0] * 4  # of the present round: time and work outside of the slot, then in the slot
        self._rounds: deque[tuple[float, ...]] = deque(maxlen=ROUNDS)
        self.slowdown: Slowdown | None = None  # None: there is too little data

    def add(self, time_s: float, work: float, *, in_slot: bool) -> None:
        self._open[2 * in_slot] += time_s
        self._open[2 * in_slot + 1] += work

    def close_round(self) -> None:
        self._rounds.append(tuple(self._open))
        self._open = [0.0] * 4
        self.slowdown = self._estimate()

    def _estimate(self) -> Slowdown | None:
        """Return the ratio with its interval, by the jackknife: how much it moves if any one round is left out."""
        slots = sum(work_in > 0 for _, _, _, work_in in self._rounds)
        sums = [sum(column) for column in zip(*self._rounds, strict=True)]
        without = [[total - part for total, part in zip(sums, parts, strict=True)] for parts in self._rounds]
        if slots < MIN_SAMPLES or min(map(min, without)) <= 0:
            return None
        logs = [_log_ratio(left) for left in without]
        middle, num_rounds = sum(logs) / len(logs), len(logs)
        variance = sum((value - middle) ** 2 for value in logs) * (num_rounds - 1) / num_rounds
        value, factor = exp(_log_ratio(sums)), exp(DEVIATIONS * sqrt(variance))
        return Slowdown(value, value / factor, value * factor, slots)


def _log_ratio(sums: Sequence[float]) -> float:
    time_out, work_out, time_in, work_in = sums
    return log(time_out / work_out) - log(time_in / work_in)


class SlowdownMeter:
    """The slots of one worker, and what they show. Times are those of the worker's clock."""

    def __init__(self, draw: Callable[[], float], step_time: StepTimeModel) -> None:
        """`draw` returns a random number in [0, 1). `step_time` predicts steps without bulk."""
        self._draw = draw
        self._step_time = step_time
        self._is_on = False
        self._begins_s = NEVER_S  # of the present slot, or of the next one
        self._ended_s = -NEVER_S  # of the last slot
        self._bulk_ended_s = -NEVER_S  # end of the newest step with bulk
        self._first_tokens: defaultdict[str, Comparison] = defaultdict(Comparison)  # by tier
        self._answers: defaultdict[str, Comparison] = defaultdict(Comparison)  # by tier

    def readings(self) -> dict[tuple[str, str], Slowdown | None]:
        """Return what is known, by tier and by kind of latency: "ttft" (first tokens) or "e2e" (whole answers)."""
        found = {"ttft": self._first_tokens, "e2e": self._answers}
        return {(tier, kind): c.slowdown for kind, by_tier in found.items() for tier, c in by_tier.items()}

    def withholds(self, is_on: bool, states: Iterable[RequestState], now: float) -> bool:
        """Return whether bulk must not run in a step that begins now. `states` are the interactive requests."""
        if is_on != self._is_on:
            self._is_on, self._begins_s = is_on, now + self._gap_s(SLOT_S) if is_on else NEVER_S
        if now < self._begins_s:
            return False
        counted_s = now - self._from_s
        if counted_s < SLOT_S or (counted_s < MAX_SLOT_S and any(s.in_slot and s.awaits_first_token for s in states)):
            return True
        self._end_slot(now)
        return False

    def note_arrival(self, state: RequestState, *, beside_bulk: bool) -> None:
        """Record whether the request arrived in a slot. `beside_bulk`: a step with bulk runs."""
        arrived_s = state.arrived_s
        if not state.tier.is_interactive:
            return
        if arrived_s < self._begins_s:
            state.in_slot = False if self._is_on and arrived_s >= self._ended_s else None
        elif not beside_bulk and self._from_s <= arrived_s < self.until_s:
            state.in_slot = True

    def note_first_token(self, state: RequestState, now: float) -> None:
        if state.in_slot is not None and not state.yields:
            self._first_tokens[state.tier.name].add(now - state.arrived_s, 1.0, in_slot=state.in_slot)

    def add_step(
        self,
        runs: Sequence[InteractiveRun],
        states: Iterable[RequestState],
        step_s: float,
        now: float,
        *,
        has_bulk: bool,
    ) -> None:
        """Enter a step that took `step_s` and ends now. `runs` are its interactive runs.

        `states` are the interactive requests. Each counts the step from its arrival on, without the runs of others.
        """
        begun_s = now - step_s
        in_slot = begun_s >= self._begins_s
        if self._is_on and step_s > 0 and (not in_slot or self._from_s <= begun_s < self.until_s):
            alone_s, runs_s, own_s = self._alone(runs)
            for tier, present in _present(states, begun_s, step_s).items():
                own = own_s.get(tier, 0.0)
                time_s, work_s = present * (step_s - runs_s) + own, present * (alone_s - runs_s) + own
                self._answers[tier].add(time_s, work_s, in_slot=in_slot)
        if has_bulk:
            self._bulk_ended_s = now

    def _alone(self, runs: Sequence[InteractiveRun]) -> tuple[float, float, Mapping[str, float]]:
        """Return the predicted time of a step with only these runs, and their part of it.

        The third value is this part by tier, without requests that yield.
        """
        cost = self._step_time.cost(mixed=step_work(runs).is_mixed)
        own_s: defaultdict[str, float] = defaultdict(float)
        runs_s = 0.0
        for state, num_tokens, context in runs:
            run_s = cost.run(num_tokens, context)
            runs_s += run_s
            if not state.yields:
                own_s[state.tier.name] += run_s
        return cost.step(runs_s) if runs else 0.0, runs_s, own_s

    @property
    def until_s(self) -> float:
        """The time until which the present slot counts, or the next one will."""
        return self._from_s + SLOT_S

    @property
    def _from_s(self) -> float:
        """The time from which the present slot counts."""
        return max(self._begins_s, self._bulk_ended_s)

    def _end_slot(self, now: float) -> None:
        withheld_s = min(MAX_SLOT_S, now - self._begins_s)
        self._ended_s, self._begins_s = now, now + self._gap_s(withheld_s)
        for comparison in (*self._first_tokens.values(), *self._answers.values()):
            comparison.close_round()

    def _gap_s(self, withheld_s: float) -> float:
        """Return the random time until the next slot, after bulk was withheld for `withheld_s`."""
        return withheld_s * (1 / SHARE - 1) * (0.5 + self._draw())


def _present(states: Iterable[RequestState], begun_s: float, step_s: float) -> Mapping[str, float]:
    """Return how many requests were present in a step, by tier; a part of one for a part of the step."""
    present: defaultdict[str, float] = defaultdict(float)
    for state in states:
        if not (state.awaits_grammar or state.yields):
            present[state.tier.name] += max(0.0, min(1.0, 1 - (state.arrived_s - begun_s) / step_s))
    return present
