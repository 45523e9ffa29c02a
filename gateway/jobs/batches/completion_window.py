"""Completion windows: durations such as "15m", "24h" or "7d". Knows text and seconds only."""

import math
import re

SHORTEST_S, LONGEST_S = 60, 30 * 86_400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")


class InvalidWindow(ValueError):
    """The text is no completion window. The message is one sentence that says which ones there are."""


def window_s(text: str) -> int:
    """Return the seconds of a completion window. Raises `InvalidWindow`."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise InvalidWindow('it must be a duration from "1m" to "30d", such as "90s", "15m", "24h" or "7d".')
    return seconds


def checked_window(text: str) -> str:
    """Return `text` if it is a completion window. Raises `InvalidWindow`."""
    window_s(text)
    return text


def window_text(seconds: float) -> str | None:
    """Return the shortest completion window that is at least `seconds` long, in a unit that rounds by little.

    None: there is none so long. Windows of more than two units are given in whole units: minutes below two hours, hours
    below two days, else days.
    """
    if seconds > LONGEST_S:
        return None
    seconds = max(SHORTEST_S, seconds)
    unit = "m" if seconds <= 2 * _UNITS["h"] else "h" if seconds <= 2 * _UNITS["d"] else "d"
    return f"{math.ceil(seconds / _UNITS[unit])}{unit}"
