"""Max-wait in numbers: how long a newcomer may wait for others to share its first step.

Pure. A request that joins a batch spares the engine the fixed cost of a step of its own; those that wait for it lose
the time that it takes to come, 1/λ on average. So waiting pays where several requests come within that fixed cost.
"""

ARRIVALS_WORTH_IT = 4  # within the fixed cost of a step
SLACK_SHARE = 0.5  # of a first token's promise that may be spent on waiting for company


def is_worth_it(gap_s: float, fixed_s: float) -> bool:
    """With `gap_s` from one arrival to the next on average, and steps that cost `fixed_s` however little is in them."""
    return ARRIVALS_WORTH_IT * gap_s <= fixed_s


def longest_wait_ms(ttft_p99_ms: float | None, step_s: float, min_ms: float, max_ms: float) -> float:
    """The longest wait inside [min_ms, max_ms] that leaves the promise its share and the step its time."""
    if ttft_p99_ms is None:
        return max_ms
    spare_ms = SLACK_SHARE * max(0.0, ttft_p99_ms - 2000 * step_s)
    return min(max_ms, max(min_ms, spare_ms))


def fill_ms(batch_size: float, rate_per_s: float, min_ms: float, max_ms: float) -> float | None:
    """How long a batch takes to fill, if that is within bounds; `min_ms` in traffic too thin for it. None: nothing is
    known of arrivals."""
    if rate_per_s <= 0:
        return None
    needed_ms = 1000 * batch_size / rate_per_s
    return needed_ms if needed_ms <= max_ms else min_ms
