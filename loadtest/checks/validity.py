"""Find reasons not to trust the numbers of an arm: the client was too slow, or requests failed.

All functions are pure.
"""

from collections.abc import Mapping

from loadtest.estimates import ClassSummary

MAX_LAG_S = 0.02  # seconds; a client that sends later than this changes the arrival times
MAX_CLIENT_CPU_SHARE = 0.5  # share of a core; a client above it takes CPU time from a server on the same machine


def client_warnings(lag_p99_s: float, cpu_share: float) -> list[str]:
    found = []
    if lag_p99_s > MAX_LAG_S:
        found.append(f"requests were sent up to {1e3 * lag_p99_s:.0f} ms late (p99): the client is slow")
    if cpu_share > MAX_CLIENT_CPU_SHARE:
        found.append(f"the client used {cpu_share:.0%} of a core: it may be the bottleneck")
    return found


def failure_warnings(arm: str, classes: Mapping[str, ClassSummary]) -> list[str]:
    return [
        f"{arm}, {name}: {s.errors} of {s.offered} failed ({'; '.join(s.error_examples)})"
        for name, s in classes.items()
        if s.errors
    ]
