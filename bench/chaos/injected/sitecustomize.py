"""Shifts this process's wall clock by the seconds in the file that TIDEGATE_CHAOS_CLOCK names.

Python imports a module of this name at its start. bench/chaos/clock.py puts its folder on the path of the parts.
"""

import os
import time

_FILE = os.environ.get("TIDEGATE_CHAOS_CLOCK", "")
_true_ns = time.time_ns


def _shifted_ns() -> int:
    with open(_FILE, encoding="ascii") as file:
        return _true_ns() + int(float(file.read().rstrip("s\n")) * 1e9)


if _FILE:
    time.time_ns = _shifted_ns
    time.time = lambda: _shifted_ns() / 1e9
