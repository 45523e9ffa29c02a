"""What the controller has observed of one tier: latencies against its SLO, arrivals, and the margin that follows.

Knows one tier and numbers; moves no knob. Time is passed in. Owner: the controller.
"""

from collections.abc import Iterable

from engine.step_time.ewma import Ewma
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.windows import ArrivalRate, LatencyWindow, MissWindow
from scheduler.quantile_tracker import QuantileTracker

MISS_TARGET = 0.01  # share of requests that may miss: the SLO is of the p99 (ε below)
START_GAPS = 10.0  # between the tokens of a request, before one has ended
MAX_GAPS = 100.0  # of so many gaps, one may be long: with more of them, no fewer may be
GAPS_WEIGHT = 0.02  # of the newest request, in the mean number of gaps
# Share of the time allowed that is kept in reserve at first. With 5 % for gaps, 6 of 67 chats of a co-serving run on a
# CPU had a gap of 103–120 ms under an SLO of 100 ms; with 15 % none had.
START_MARGIN = {"ttft": 0.0, "itl": 0.15}
MARGIN_STEP = 0.05  # what one miss adds to a margin: η in margin ← clip(margin + η·(miss − ε), 0, MAX_MARGIN)
MAX_MARGIN = 0.6  # share of the time allowed
SERVICE_WEIGHT = 0.05  # of the newest request, in the mean time from first step to first token
SERVICE_SHARE = 0.1  # of the TTFT SLO: that mean before any request; it weighs as much as one request


class TierStats:
    def __init__(self, tier: Tier) -> None:
        self.margin_of = {kind: QuantileTracker(at, MARGIN_STEP, 0.0, MAX_MARGIN) for kind, at in START_MARGIN.items()}
        self.rate_per_s = 0.0
        self._service: Ewma | None = None  # seconds from first step to first token; None: none observed
        self._num_services = 0
        self.arrivals = ArrivalRate()
        self._ended = MissWindow()
        self._gaps = Ewma(GAPS_WEIGHT, START_GAPS)  # between the tokens of a request
        self.answered_s = -NEVER_S  # a knob was moved then: what was missed before is no reason to move it again
        self.retarget(tier)

    def retarget(self, tier: Tier) -> None:
        """Begin the windows anew: the tier's SLO has changed, and the latencies in them were held against the old."""
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
        """Take in a TTFT or an ITL, `bulk_s` of which the engine spent on bulk. A miss widens the margin, a hit narrows
        it. A first token that would have been late without bulk, too, moves nothing: less bulk would not have helped,
        and the margin would only wind up. A long gap always does: the margin shortens steps, whatever made them long.
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
        """Return how many may miss for each that does not. A request must meet all targets of its SLO, and has many
        gaps of which hardly any may be long: fewer of the gaps may miss than of the requests."""
        num_targets = sum(target_s < NEVER_S for target_s in self.target_s.values())
        return MISS_TARGET / num_targets / (self._gaps.value if kind == "itl" else 1.0)

    def add_end(self, met_slo: bool, gaps: int, now: float) -> None:
        """Take in the end of a request that had so many gaps between its tokens."""
        self._ended.add(now, not met_slo)
        self._gaps.add(min(max(gaps, 1), MAX_GAPS))

    def add_service(self, seconds: float) -> None:
        """Take in the time from a request's first step to its first token."""
        self._num_services += 1
        if self._service is None:
            expected_s = self.expected_service_s
            self._service = Ewma(SERVICE_WEIGHT, seconds if expected_s is None else expected_s)
        self._service.add(seconds, weight=max(SERVICE_WEIGHT, 1 / (1 + self._num_services)))

    @property
    def service_s(self) -> float | None:
        """Mean time from first step to first token; None before any."""
        return None if self._service is None else self._service.value

    @property
    def expected_service_s(self) -> float | None:
        """The same of the next request, from the TTFT SLO before any; None without either."""
        if self._service is not None:
            return self._service.value
        target_s = self.target_s["ttft"]
        return SERVICE_SHARE * target_s if target_s < NEVER_S else None

    def attainment(self, now: float) -> float | None:
        """Return the share of requests ended lately that met their SLO; None if none ended."""
        missed = self._ended.miss_share(now, min_samples=1)
        return None if missed is None else 1.0 - missed

    def p99_s(self, kind: str, now: float, since_s: float = -NEVER_S) -> float | None:
        return self.windows[kind].p99(now, since_s)

    def p99_ratio(self, kind: str, now: float, since_s: float = -NEVER_S) -> float | None:
        """Return p99 ÷ target; None without a target or without enough data."""
        p99_s = self.p99_s(kind, now, since_s)
        return None if p99_s is None else p99_s / self.target_s[kind]

    def worst_miss_share(self, now: float, since_s: float) -> float | None:
        """Return the larger share of misses, of first tokens or gaps since `since_s`; None without enough data."""
        return _worst(self.windows.values(), now, since_s)

    def worst_bulk_miss_share(self, now: float, since_s: float) -> float | None:
        """Return the same, of the misses that would have been hits without bulk."""
        return _worst(self._bulk_misses.values(), now, since_s)


def _worst(windows: Iterable[LatencyWindow | MissWindow], now: float, since_s: float) -> float | None:
    shares = [window.miss_share(now, since_s) for window in windows]
    return max((share for share in shares if share is not None), default=None)
