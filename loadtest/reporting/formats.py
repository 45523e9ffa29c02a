"""Functions that format numbers for table cells: units, rounding, and a dash for an unknown value."""

from loadtest.estimates import Estimate

ABSENT = "–"


def number(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}"


def interval(estimate: Estimate | None) -> str:
    """Return the value with its 95 % confidence interval."""
    return ABSENT if estimate is None else f"{estimate.value:.2f} ({estimate.low:.2f}–{estimate.high:.2f})"


def percent(share: float | None, digits: int = 1) -> str:
    return ABSENT if share is None else f"{100 * share:.{digits}f} %"


def milliseconds(seconds: float | None) -> str:
    """Return the time in ms: whole milliseconds, or tenths below 10 ms."""
    if seconds is None:
        return ABSENT
    ms = 1000 * seconds
    return f"{ms:,.0f}" if ms >= 10 else f"{ms:.1f}"
