"""What is known of the server: its load, and since when and why it has been away.

Does not know requests or streams. The time is passed in.
"""

from engine.streaming import UpstreamError, UpstreamLoad, UpstreamUnusable
from scheduler.clock import NEVER_S

DOWN_GRACE_S = 2.0  # seconds without the server after which the worker counts as dead


class ServerState:
    def __init__(self) -> None:
        self._load = UpstreamLoad()
        self._down_since_s: float | None = None
        self.progress_s = -NEVER_S  # time of the newest token of any stream
        # Whether the server has not said anything yet, or not since a stream broke off.
        self.must_be_asked = True
        self.reason = ""  # why the server is away, as a sentence
        self.awaits_trial = False  # whether the server turned us away, so that a trial must say when it serves us

    @property
    def is_reachable(self) -> bool:
        return self._down_since_s is None

    @property
    def is_in_doubt(self) -> bool:
        """Whether the server may be away or another one: nobody has asked since the start or a broken stream."""
        return self._down_since_s is not None or self.must_be_asked

    @property
    def kv_usage(self) -> float:
        return self._load.kv_usage or 0.0

    @property
    def num_waiting(self) -> int | None:
        """The number of requests that wait at the server, as it says; None if it does not say."""
        return self._load.num_waiting

    def is_down(self, now: float) -> bool:
        """Return whether the server has been away for so long that this worker must not look alive."""
        return self._down_since_s is not None and now - self._down_since_s >= DOWN_GRACE_S

    def note_load(self, load: UpstreamLoad | None) -> None:
        """Record that the server serves us, and what it says of its load."""
        self._down_since_s, self.must_be_asked, self.awaits_trial = None, False, False
        if load is not None:
            self._load = load

    def note_unreachable(self, error: UpstreamError, now: float, *, is_certain: bool = False) -> None:
        """Record that the server does not take connections, or serves nobody who asks as we do.

        Unless it `is_certain`, newer tokens count for more: a busy server may answer late.
        """
        if is_certain or now - self.progress_s > DOWN_GRACE_S:
            self.awaits_trial = self.awaits_trial or isinstance(error, UpstreamUnusable)
            self.reason = str(error)
            if self._down_since_s is None:
                self._down_since_s = now
