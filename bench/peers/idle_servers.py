"""Whether the servers that were not measured were idle: they share the machine with the one that was. Pure."""

from collections.abc import Sequence

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
