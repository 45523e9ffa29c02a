"""Reasons not to trust the numbers of an arm: a client that was too slow, requests that failed. Pure."""

from collections.abc import Mapping

from loadtest.estimates import ClassSummary

MAX_LAG_S = 0.02  # seconds; beyond it, the client changes the arrival times
MAX_CLIENT_CPU_SHARE = 0.5  # of a core; above it the client takes CPU from a server on the same machine


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
