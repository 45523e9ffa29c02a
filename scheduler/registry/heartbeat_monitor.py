"""Tells which processes have gone silent: their heartbeats in the store do not change any more.

Counts reads of the heartbeats instead of measuring time. A store that does not answer, or a reader that was stopped,
therefore makes no process look silent: nothing was read meanwhile. Knows ids and heartbeats; does not read the store.
"""

from collections.abc import Mapping

CHECK_S = 0.5  # seconds between two reads
# Seconds without a new heartbeat, after which a process counts as silent. Workers send one every second, so one of them
# may be missed.
WORKER_SILENT_S = 2.0
# Gateways send one every second too. They get more time: a large body may keep a gateway's event loop busy, and the
# requests of a silent gateway are dropped, while those of a silent worker only move.
GATEWAY_SILENT_S = 3.5


class HeartbeatMonitor:
    """Watches the heartbeats of several processes. Pass every read to `observe`, one each `CHECK_S` seconds."""

    def __init__(self, silent_s: float) -> None:
        self._max_unchanged = round(silent_s / CHECK_S)
        self._last: dict[str, int | None] = {}  # the last heartbeat of each process
        self._unchanged: dict[str, int] = {}  # number of reads since then

    @property
    def watched(self) -> set[str]:
        return set(self._last)

    def is_silent(self, process_id: str) -> bool:
        return self._unchanged.get(process_id, 0) >= self._max_unchanged

    def is_alive(self, process_id: str, beat: int) -> bool:
        """Return whether a process with this newest heartbeat, from a read that is not observed, is not silent."""
        return not self.is_silent(process_id) or beat != self._last.get(process_id)

    def observe(self, beats: Mapping[str, int | None]) -> list[str]:
        """Process one read: the newest heartbeat of each process, or None if the store has none.

        A heartbeat is any number that changes with every heartbeat. Return the processes that have gone silent with
        this read. A process that is not in `beats` any more goes silent after the same time, and is forgotten then.
        """
        newly_silent = []
        for process_id in sorted({*self._last, *beats}):
            self._count(process_id, beats.get(process_id))
            if self._unchanged[process_id] == self._max_unchanged:
                newly_silent.append(process_id)
            if self.is_silent(process_id) and process_id not in beats:
                del self._last[process_id], self._unchanged[process_id]
        return newly_silent

    def _count(self, process_id: str, beat: int | None) -> None:
        is_known = process_id in self._last
        if is_known and beat in (None, self._last[process_id]):
            self._unchanged[process_id] += 1
        else:
            self._last[process_id], self._unchanged[process_id] = beat, 0
