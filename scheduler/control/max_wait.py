"""Max-wait: formulas for how long a new request may wait for further requests that share its first step.

A request that joins a batch spares the engine the fixed cost of a separate step. The requests that wait for it lose the
time until it arrives, which is 1/λ on average at an arrival rate of λ. Waiting pays if several requests arrive within
the fixed cost of a step. All functions are pure.
"""

MIN_ARRIVALS = 4  # waiting pays if at least this many requests arrive within the fixed cost of a step
WAIT_SHARE = 0.5  # share of the TTFT SLO, after two steps are subtracted, that a request may wait for other requests


def is_worth_it(arrival_gap_s: float, fixed_s: float) -> bool:
    """Return whether waiting for further requests pays.

    `arrival_gap_s` is the mean time between two arrivals, and `fixed_s` is the fixed cost of a step.
    """
    return MIN_ARRIVALS * arrival_gap_s <= fixed_s


def longest_wait_ms(ttft_p99_ms: float | None, step_s: float, min_ms: float, max_ms: float) -> float:
    """Return the longest wait inside [min_ms, max_ms] that leaves enough time to meet the TTFT SLO.

    The wait is `WAIT_SHARE` of the time that the SLO leaves after two steps of `step_s` seconds, limited to the bounds.
    Without a TTFT SLO, the wait is `max_ms`.
    """
    if ttft_p99_ms is None:
        return max_ms
    spare_ms = WAIT_SHARE * max(0.0, ttft_p99_ms - 2 * 1000 * step_s)
    return min(max_ms, max(min_ms, spare_ms))


def fill_ms(batch_size: float, rate_per_s: float, min_ms: float, max_ms: float) -> float | None:
    """Return how many ms a batch takes to fill at `rate_per_s` arrivals per second; None if the rate is 0.

    Return `min_ms` if the batch takes longer than `max_ms` to fill.
    """
    if rate_per_s <= 0:
        return None
    needed_ms = 1000 * batch_size / rate_per_s
    return needed_ms if needed_ms <= max_ms else min_ms
