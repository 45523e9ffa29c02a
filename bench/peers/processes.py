"""What the processes of a server cost while another server is measured.

Knows processes; does not know what a server does. Imports psutil, an optional package, only when it is used.
"""

from contextlib import suppress
from time import perf_counter

from loadtest.serving import Server


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
