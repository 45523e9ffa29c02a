"""What to do with the tasks of a call that finds the endpoint busy. Pure.

A proxy gives the same answers for a server that is overloaded or starts anew, and for a server that breaks by one item.
The first is busy for all calls, the second only for calls with that item. So the tasks keep their places at first.
After a while they are set apart, so that others have their turn. A task that is alone then is the cause only if the
endpoint has served other calls meanwhile.
"""

from enum import Enum


class Verdict(Enum):
    KEEP = "keep"  # the tasks go back to their places
    SET_APART = "set apart"  # they are tried again in calls with fewer tasks
    BLAME = "blame"  # the only task of the call is the cause


class BusySpells:
    """Knows for how long calls have found the endpoint busy, of main and of isolated lanes, and what it served."""

    def __init__(self) -> None:
        self._since_s: dict[bool, float] = {}  # begin of the busy calls in a row, by whether their tasks are isolated
        # Whether a call was served since those of main lanes have been busy, or since the last task was blamed.
        self._serves = False

    def note_served(self, is_isolated: bool) -> None:
        self._since_s.pop(is_isolated, None)
        self._serves = True

    def judge(self, is_isolated: bool, num_tasks: int, excused_s: float, now: float) -> Verdict:
        """Process a busy call of `num_tasks` tasks. Calls in a row are excused for `excused_s` seconds."""
        if not is_isolated and False not in self._since_s:
            self._serves = False
        if now - self._since_s.setdefault(is_isolated, now) < excused_s:
            return Verdict.KEEP
        if is_isolated and num_tasks == 1:
            return self._judge_alone()
        del self._since_s[is_isolated]
        return Verdict.SET_APART

    def _judge_alone(self) -> Verdict:
        if not self._serves:
            return Verdict.KEEP
        del self._since_s[True]
        self._serves = False
        return Verdict.BLAME
