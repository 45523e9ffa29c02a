"""The controller's observations of one tier: its latencies and arrivals, and the safety margins computed from misses.

Knows one tier and numbers; does not move knobs. The time is passed in. The controller owns the statistics.
"""

from collections.abc import Iterable

from engine.step_time.ewma import Ewma
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.windows import ArrivalRate, LatencyWindow, MissWindow
from scheduler.quantile_tracker import QuantileTracker

MISS_TARGET = 0.01  # share of latencies that may miss their target, since the SLO is a p99 (ε in the formula below)
START_GAPS = 10.0  # number of gaps between the tokens of a request that is assumed until the first request ends
# Upper limit for the number of gaps of one request. A request meets its SLO if at most 1 % of its gaps are too long.
# With fewer than 100 gaps none may be too long. With more gaps, the permitted share does not get any smaller.
MAX_GAPS = 100.0
GAPS_WEIGHT = 0.02  # weight of the newest request in the mean number of gaps
# The first margins: shares of the allowed time that are kept in reserve. With 5 % for gaps, 6 of 67 chats of a
# isolation run on a CPU had a gap of 103–120 ms under an SLO of 100 ms. With 15 %, no chat had such a gap.
START_MARGIN = {"ttft": 0.0, "itl": 0.15}
MARGIN_STEP = 0.05  # added to a margin by a miss: η in margin ← clip(margin + η·(miss − ε), 0, MAX_MARGIN)
MAX_MARGIN = 0.6  # upper limit of a margin, as a share of the allowed time
SERVICE_WEIGHT = 0.05  # weight of the newest request in the mean time from first step to first token
SERVICE_SHARE = 0.1  # share of the TTFT SLO: the first guess of that mean time; it counts as one observed request


class TierStats:
    """The windows, means and margins of one tier."""

    def __init__(self, tier: Tier) -> None:
        self.margin_of = {kind: QuantileTracker(at, MARGIN_STEP, 0.0, MAX_MARGIN) for kind, at in START_MARGIN.items()}
        self.rate_per_s = 0.0
        self._service: Ewma | None = None  # seconds from first step to first token; None: no request observed yet
        self._num_services = 0
        self.arrivals = ArrivalRate()
        self._ended = MissWindow()
        self._gaps = Ewma(GAPS_WEIGHT, START_GAPS)  # mean number of gaps between the tokens of a request
        self.last_cut_s = -NEVER_S  # time of the newest cut of a knob: earlier misses are no reason for another cut
        self.retarget(tier)

    def retarget(self, tier: Tier) -> None:
        """Replace the windows by empty ones, because their latencies were compared with an SLO that has changed."""
        slo = tier.slo
        self.target_s = {
            "ttft": slo.ttft_p99_ms / 1000 if slo.ttft_p99_ms else NEVER_S,
            "itl": slo.itl_p99_ms / 1000 if slo.itl_p99_ms else NEVER_S,
        }
        self.windows = {kind: LatencyWindow(target_s) for kind, target_s in self.target_s.items()}
        self._bulk_misses = {kind: MissWindow() for kind in self.target_s}

    @property
    def margin(self) -> float:
        return max(margin.value for margin in self.margin_of.values())

    def add_latency(self, kind: str, seconds: float, now: float, bulk_s: float) -> None:
        """Record a TTFT or an ITL. `bulk_s` is the part of `seconds` that the engine spent on bulk.

        A miss widens the margin, and a hit narrows it. There is one exception: if a first token would have been late
        even without bulk, the margin stays the same. Less bulk would not have helped, and the margin would only grow to
        its limit. A gap that is too long always widens the margin, because the margin for gaps shortens all steps.
        """
        target_s = self.target_s[kind]
        if target_s == NEVER_S:
            return
        is_miss, bulk_made_it = seconds > target_s, seconds - bulk_s <= target_s
        self.windows[kind].add(now, seconds)
        self._bulk_misses[kind].add(now, is_miss and bulk_made_it)
        if not is_miss:
            self.margin_of[kind].down(self._misses_per_hit(kind))
        elif bulk_made_it or kind == "itl":
            self.margin_of[kind].up()

    def _misses_per_hit(self, kind: str) -> float:
        """Return how many latencies of this kind may miss for each latency that does not miss.

        The result is smaller than `MISS_TARGET` if the SLO has several targets, since a request must meet all of them.
        It is also smaller for gaps, since a request has many gaps and hardly any of them may be too long.
        """
        num_targets = sum(target_s < NEVER_S for target_s in self.target_s.values())
        return MISS_TARGET / num_targets / (self._gaps.value if kind == "itl" else 1.0)

    def add_end(self, met_slo: bool, gaps: int, now: float) -> None:
        """Record the end of a request. `gaps` is the number of gaps between its tokens."""
        self._ended.add(now, not met_slo)
        self._gaps.add(min(max(gaps, 1), MAX_GAPS))

    def add_service(self, seconds: float) -> None:
        """Record the time from a request's first step to its first token."""
        self._num_services += 1
        if self._service is None:
            expected_s = self.expected_service_s
            self._service = Ewma(SERVICE_WEIGHT, seconds if expected_s is None else expected_s)
        self._service.add(seconds, weight=max(SERVICE_WEIGHT, 1 / (1 + self._num_services)))

    @property
    def service_s(self) -> float | None:
        """The mean time in seconds from first step to first token; None before the first observation."""
        return None if self._service is None else self._service.value

    @property
    def expected_service_s(self) -> float | None:
        """The time in seconds from first step to first token that is expected for the next request.

        Before the first observation, it is a share of the TTFT SLO. None if there is no TTFT SLO either.
        """
        if self._service is not None:
            return self._service.value
        target_s = self.target_s["ttft"]
        return SERVICE_SHARE * target_s if target_s < NEVER_S else None

    def attainment(self, now: float) -> float | None:
        """Return the share of requests ended in the last `WINDOW_S` seconds that met their SLO; None if none ended."""
        missed = self._ended.miss_share(now, min_samples=1)
        return None if missed is None else 1.0 - missed

    def p99_s(self, kind: str, now: float, since_s: float = -NEVER_S) -> float | None:
        return self.windows[kind].p99(now, since_s)

    def p99_ratio(self, kind: str, now: float, since_s: float = -NEVER_S) -> float | None:
        """Return p99 ÷ target of the latencies since `since_s`; None if there is no target or too little data."""
        p99_s = self.p99_s(kind, now, since_s)
        return None if p99_s is None else p99_s / self.target_s[kind]

    def worst_miss_share(self, now: float, since_s: float) -> float | None:
        """Return the share of misses among first tokens or among gaps since `since_s`, whichever share is larger.

        Return None if there is too little data.
        """
        return _worst(self.windows.values(), now, since_s)

    def worst_bulk_miss_share(self, now: float, since_s: float) -> float | None:
        """Return the same share as `worst_miss_share`, but count only the misses that bulk caused.

        Bulk caused a miss if the latency would have met its target without bulk.
        """
        return _worst(self._bulk_misses.values(), now, since_s)


def _worst(windows: Iterable[LatencyWindow | MissWindow], now: float, since_s: float) -> float | None:
    shares = [window.miss_share(now, since_s) for window in windows]
    return max((share for share in shares if share is not None), default=None)
