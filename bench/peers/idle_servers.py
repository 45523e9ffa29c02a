"""Whether the servers that were not measured were idle: they share the machine with the one that was. Pure."""

from collections.abc import Sequence

MAX_IDLE_CORES = 0.05  # CPU cores; a server that uses more while it has no requests takes time from the others

Used = Sequence[tuple[str, float | None]]  # (arm, cores that the other servers used while it was measured)


def idle_facts(used: Used) -> tuple[tuple[str, str], ...]:
    """Return, for each arm, the largest number of cores that the other servers used in one of its parts."""
    return tuple(
        (f"cores used by the other servers, {arm}", f"at most {cores:.3f}") for arm, cores in _largest(used).items()
    )


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
