"""Max-wait in numbers: how long a new request may wait for others that share its first step. Pure.

A request that joins a batch spares the engine the fixed cost of a step of its own; those that wait for it lose the time
until it arrives, 1/λ on average. Waiting pays where several requests arrive within that fixed cost.
"""

MIN_ARRIVALS = 4  # within the fixed cost of a step, for waiting to pay
WAIT_SHARE = 0.5  # of the TTFT SLO left beside two steps: what may be spent on waiting for others


def is_worth_it(arrival_gap_s: float, fixed_s: float) -> bool:
    """Return whether waiting pays, with the mean time between two arrivals and the fixed cost of a step."""
    return MIN_ARRIVALS * arrival_gap_s <= fixed_s


def longest_wait_ms(ttft_p99_ms: float | None, step_s: float, min_ms: float, max_ms: float) -> float:
    """Return the longest wait inside [min_ms, max_ms] that leaves time for the steps and for the SLO."""
    if ttft_p99_ms is None:
        return max_ms
    spare_ms = WAIT_SHARE * max(0.0, ttft_p99_ms - 2 * 1000 * step_s)
    return min(max_ms, max(min_ms, spare_ms))


def fill_ms(batch_size: float, rate_per_s: float, min_ms: float, max_ms: float) -> float | None:
    """Return how long a batch takes to fill; `min_ms` where that is longer than `max_ms`; None where no arrivals are
    known."""
    if rate_per_s <= 0:
        return None
    needed_ms = 1000 * batch_size / rate_per_s
    return needed_ms if needed_ms <= max_ms else min_ms
