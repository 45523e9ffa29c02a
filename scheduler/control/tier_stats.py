"""The controller's observations of one tier: its latencies and arrivals, which of its targets were missed.

Knows one tier and numbers; does not move knobs. The time is passed in. The controller owns the statistics.
"""

from collections.abc import Iterable

from engine.step_time.ewma import Ewma
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.step_limit import FIRST_STEP_SHARE
from scheduler.control.windows import ArrivalRate, SlidingWindow

MISS_TARGET = 0.01  # share of latencies that may miss their target, since the SLO is a p99
NEWEST_WEIGHT = 0.05  # weight of the newest observation in each mean over requests or steps


class TierStats:
    """The windows and means of one tier."""

    def __init__(self, tier: Tier) -> None:
        self.rate_per_s = 0.0
        self._service: Ewma | None = None  # seconds from first step to first token; None: no request observed yet
        self._short_prompt: Ewma | None = None  # seconds that the work of the shortest of the newest prompts takes
        self._num_services = 0
        self._sequences: Ewma | None = None  # in a step that has any
        self.arrivals = ArrivalRate()
        self._ended = SlidingWindow()
        self.last_cut_s = -NEVER_S  # time of the newest cut of a knob: earlier misses are no reason for another cut
        self.retarget(tier)

    def retarget(self, tier: Tier) -> None:
        """Replace the windows by empty ones, because their latencies were compared with an SLO that has changed."""
        slo = tier.slo
        self.target_s = {
            "ttft": slo.ttft_p99_ms / 1000 if slo.ttft_p99_ms else NEVER_S,
            "itl": slo.itl_p99_ms / 1000 if slo.itl_p99_ms else NEVER_S,
        }
        self._windows = {kind: SlidingWindow() for kind in self.target_s}
        self._bulk_misses = {kind: SlidingWindow() for kind in self.target_s}

    def add_latency(self, kind: str, seconds: float, now: float, bulk_s: float, own_s: float) -> None:
        """Record a TTFT, an ITL, or a "service".

        `bulk_s` is the part of `seconds` that the engine spent on bulk, and `own_s` that on the request's own work.
        """
        if kind == "service":
            self._add_service(seconds, own_s)
            return
        target_s = self.target_s[kind]
        if target_s < NEVER_S:
            self._windows[kind].add(now, seconds > target_s, seconds)
            self._bulk_misses[kind].add(now, seconds - bulk_s <= target_s < seconds)

    def add_end(self, met_slo: bool, now: float) -> None:
        self._ended.add(now, not met_slo)

    def _add_service(self, seconds: float, own_s: float) -> None:
        """Record the time from a request's first step to its first token."""
        self._num_services += 1
        self._service = self._service or Ewma(NEWEST_WEIGHT)
        self._service.add(seconds, weight=max(NEWEST_WEIGHT, 1 / self._num_services))
        self._short_prompt = self._short_prompt or Ewma(NEWEST_WEIGHT, own_s)
        self._short_prompt.add(own_s, weight=1 if own_s < self._short_prompt.value else NEWEST_WEIGHT)

    def add_step(self, sequences: int) -> None:
        """Record how many sequences of the tier a step had."""
        self._sequences = self._sequences or Ewma(NEWEST_WEIGHT, sequences)
        self._sequences.add(sequences)

    @property
    def step_sequences(self) -> float | None:
        """The mean number of sequences in a step that has any; None before the first one."""
        return None if self._sequences is None else round(self._sequences.value, 2)

    @property
    def service_s(self) -> float | None:
        """The mean time in seconds from first step to first token; None before the first observation."""
        return None if self._service is None else self._service.value

    def ttft_s(self, step_s: float) -> float:
        """Return how soon a first token must come: the TTFT SLO; NEVER_S if there is none.

        A target that even short prompts miss alone is no reason for short steps: a whole one then fits into the first
        step. `step_s` is the fixed cost of a step.
        """
        target_s, alone_s = self.target_s["ttft"], self._alone_s(step_s)
        return target_s if alone_s <= target_s else alone_s / FIRST_STEP_SHARE

    def prefills_s(self, step_s: float) -> float:
        """Return how much longer prefills make a step in an overload: the TTFT SLO, or a short prompt; 0 without it."""
        target_s = self.target_s["ttft"]
        return max(target_s, self._alone_s(step_s)) if target_s < NEVER_S else 0.0

    def _alone_s(self, step_s: float) -> float:
        """Return the time in seconds that a first token takes alone, after the shortest of the newest prompts."""
        return step_s + (0.0 if self._short_prompt is None else self._short_prompt.value)

    def attainment(self, now: float) -> float | None:
        """Return the share of requests ended in the last `WINDOW_S` seconds that met their SLO; None if none ended."""
        missed = self._ended.miss_share(now, min_samples=1)
        return None if missed is None else 1.0 - missed

    def p99_s(self, kind: str, now: float, since_s: float = -NEVER_S) -> float | None:
        return self._windows[kind].p99(now, since_s)

    def p99_ratio(self, kind: str, now: float, since_s: float = -NEVER_S) -> float | None:
        """Return p99 ÷ target of the latencies since `since_s`; None if there is no target or too little data."""
        p99_s = self.p99_s(kind, now, since_s)
        return None if p99_s is None else p99_s / self.target_s[kind]

    def worst_miss_share(self, now: float) -> float | None:
        """Return the share of misses among first tokens or among gaps, whichever share is larger.

        Return None if there is too little data.
        """
        return _worst(self._windows.values(), now, -NEVER_S)

    def worst_bulk_miss_share(self, now: float, since_s: float) -> float | None:
        """Return the same share as `worst_miss_share`, but count only misses since `since_s` that bulk caused.

        Bulk caused a miss if the latency would have met its target without bulk.
        """
        return _worst(self._bulk_misses.values(), now, since_s)


def _worst(windows: Iterable[SlidingWindow], now: float, since_s: float) -> float | None:
    shares = [window.miss_share(now, since_s) for window in windows]
    return max((share for share in shares if share is not None), default=None)
