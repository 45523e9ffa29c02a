"""What the controller has seen of one tier: latencies against its promises, arrivals, and the margin that follows.

Knows one tier and numbers; moves no knob. Time is passed in. Owner: the controller.
"""

from collections.abc import Iterable

from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.windows import ArrivalRate, LatencyWindow, MissWindow, ShareWindow

MISS_TARGET = 0.01  # ε: the share that a p99 promise lets miss
GAPS_START = 10.0  # between the tokens of a request, before one has ended
GAPS_MOST = 100.0  # of so many, one may be long
GAPS_WEIGHT = 0.02  # of the newest request
MARGIN_START = {"ttft": 0.0, "itl": 0.15}
MARGIN_UP = 0.05  # a miss
MARGIN_MAX = 0.6
SERVICE_WEIGHT = 0.05  # of the newest request in the smoothed time from its first step to its first token, …
SERVICE_SHARE = 0.1  # … which is taken for this share of the promise at first, and weighs as one request


class Observations:
    def __init__(self, tier: Tier) -> None:
        self.margins = dict(MARGIN_START)
        self.rate_per_s = 0.0
        self.service_s: float | None = None
        self._num_services = 0
        self.arrivals = ArrivalRate()
        self.attainment = ShareWindow()
        self._gaps = GAPS_START  # between the tokens of the usual request
        self.since_s = -NEVER_S  # what was missed before has been answered
        self.retarget(tier)

    def retarget(self, tier: Tier) -> None:
        """The tier's promises are new: what was seen is held against the old ones and goes."""
        slo = tier.slo
        self.target_s = {
            "ttft": slo.ttft_p99_ms / 1000 if slo.ttft_p99_ms else NEVER_S,
            "itl": slo.itl_p99_ms / 1000 if slo.itl_p99_ms else NEVER_S,
        }
        self.windows = {kind: LatencyWindow(target_s) for kind, target_s in self.target_s.items()}
        self._harm = {kind: MissWindow() for kind in self.target_s}

    @property
    def margin(self) -> float:
        return max(self.margins.values())

    def add_latency(self, kind: str, seconds: float, now: float, bulk_s: float) -> None:
        """Quantile tracking: in balance when as many miss as may; faster up than down. A first token that would have
        been late without the `bulk_s` spent on bulk, too, moves nothing: less bulk would not have helped, and the
        margin would only wind up. A long gap always does: the margin shortens steps, whatever made them long."""
        target_s = self.target_s[kind]
        if target_s == NEVER_S:
            return
        is_miss, to_blame = seconds > target_s, seconds - bulk_s <= target_s
        self.windows[kind].add(now, seconds)
        self._harm[kind].add(now, is_miss and to_blame)
        if not is_miss:
            self.margins[kind] = max(0.0, self.margins[kind] - MARGIN_UP * self._may_miss(kind))
        elif to_blame or kind == "itl":
            self.margins[kind] = min(MARGIN_MAX, self.margins[kind] + MARGIN_UP)

    def _may_miss(self, kind: str) -> float:
        """As a share. A request must keep all promises, and has hardly any long gap among its many: of gaps, fewer may
        miss than of requests."""
        num_promises = sum(target_s < NEVER_S for target_s in self.target_s.values())
        return MISS_TARGET / num_promises / (self._gaps if kind == "itl" else 1.0)

    def add_end(self, met_slo: bool, gaps: int, now: float) -> None:
        """A request ended, with so many gaps between its tokens."""
        self.attainment.add(now, met_slo)
        self._gaps += GAPS_WEIGHT * (min(max(gaps, 1), GAPS_MOST) - self._gaps)

    def add_service(self, seconds: float) -> None:
        """From the first step of a request to its first token."""
        self._num_services += 1
        before = self.expected_service_s
        weight = max(SERVICE_WEIGHT, 1 / (1 + self._num_services))
        self.service_s = seconds if before is None else before + weight * (seconds - before)

    @property
    def expected_service_s(self) -> float | None:
        """The same of the next one; None where nothing was promised or seen."""
        if self.service_s is not None:
            return self.service_s
        target_s = self.target_s["ttft"]
        return SERVICE_SHARE * target_s if target_s < NEVER_S else None

    def p99_s(self, kind: str, now: float, since_s: float = -NEVER_S) -> float | None:
        return self.windows[kind].p99(now, since_s)

    def p99_ratio(self, kind: str, now: float, since_s: float = -NEVER_S) -> float | None:
        """Of the promise; None without one or without enough data."""
        p99_s = self.p99_s(kind, now, since_s)
        return None if p99_s is None else p99_s / self.target_s[kind]

    def worst_miss_share(self, now: float, since_s: float) -> float | None:
        """Of either promise; None without enough data."""
        return _worst(self.windows.values(), now, since_s)

    def worst_harm(self, now: float, since_s: float) -> float | None:
        """The same, of misses that bulk had a part in."""
        return _worst(self._harm.values(), now, since_s)


def _worst(windows: Iterable[LatencyWindow | MissWindow], now: float, since_s: float) -> float | None:
    shares = [window.miss_share(now, since_s) for window in windows]
    return max((share for share in shares if share is not None), default=None)
