"""An estimate of a quantile that is updated with every sample, without storing samples.

Each sample above the estimate raises it by a step. Each other sample lowers it by `odds` times that step. The estimate
settles when both movements cancel: one sample exceeds the estimate for every 1 ÷ `odds` samples that do not exceed it.
The estimate changes only when a sample comes, and a sample that exceeds it takes effect at once.
"""


class QuantileTracker:
    """An estimate (`value`) that follows a quantile and stays inside [low, high].

    With `relative`, the size of a step is a share of the value; without it, the size is an absolute amount.
    """

    __slots__ = ("_high", "_low", "_relative", "_step_up", "value")

    def __init__(self, value: float, step_up: float, low: float, high: float, *, relative: bool = False) -> None:
        self.value = value
        self._step_up = step_up
        self._low = low
        self._high = high
        self._relative = relative

    def up(self) -> None:
        """Raise the value, because a sample exceeded it."""
        self._move(self._step_up)

    def down(self, odds: float) -> None:
        """Lower the value, because a sample did not exceed it.

        `odds` is the permitted number of samples above the value for each sample that is not above it.
        """
        self._move(-self._step_up * odds)

    def _move(self, step: float) -> None:
        moved = self.value * (1 + step) if self._relative else self.value + step
        self.value = min(self._high, max(self._low, moved))
