"""Whether the servers that are not measured are idle: they share the machine with the one that is.

Knows processes; does not know what a server does. Imports psutil, an optional package, only when it is used.
"""

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

from loadtest.serving import Server

MAX_IDLE_CORES = 0.05  # CPU cores; a server that uses more while it has no requests takes time from the others

Used = Sequence[tuple[str, float | None]]  # (arm, cores that the other servers used while it was measured)


def idle_facts(used: Used) -> tuple[tuple[str, str], ...]:
    """Return the largest number of cores that idle servers used in a part, with the arm of this part."""
    largest = _largest(used)
    if not largest:
        return ()
    arm = max(largest, key=lambda name: largest[name])
    return (("CPU cores used by the idle servers", f"at most {largest[arm]:.3f}, beside {arm}"),)


def idle_warnings(used: Used) -> list[str]:
    return [
        f"{arm}: the other servers used {cores:.2f} cores while it was measured: they were not idle"
        for arm, cores in _largest(used).items()
        if cores > MAX_IDLE_CORES
    ]


def _largest(used: Used) -> dict[str, float]:
    largest: dict[str, float] = {}
    for arm, cores in used:
        if cores is not None:
            largest[arm] = max(cores, largest.get(arm, 0.0))
    return largest


class CpuMeter:
    """The CPU time that some servers use from now on. Servers that were not started by us are left out."""

    def __init__(self, servers: list[Server]) -> None:
        self._pids = [server.pid for server in servers if server.pid is not None]
        self._start_s = perf_counter()
        self._used_before_s = self._used_s()

    def cores(self) -> float | None:
        """Return the mean number of cores that the servers have used since the start; None without servers."""
        elapsed_s = perf_counter() - self._start_s
        return (self._used_s() - self._used_before_s) / elapsed_s if self._pids else None

    def _used_s(self) -> float:
        return sum(map(tree_cpu_s, self._pids))


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of all its descendants that are alive; 0 if it has ended."""
    import psutil

    used_s = 0.0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used_s += times.user + times.system
    return used_s
