"""A quantile that is followed sample by sample: up by a step for each sample above it, down by less for each other one.

The value settles where steps up and down cancel: where one sample exceeds it for every 1 ÷ `odds` that do not. It moves
on samples only, and reacts to an excess at once.
"""


class QuantileTracker:
    """`value` stays inside [low, high]. With `relative`, steps are shares of the value itself."""

    __slots__ = ("_high", "_low", "_relative", "_step_up", "value")

    def __init__(self, value: float, step_up: float, low: float, high: float, *, relative: bool = False) -> None:
        self.value = value
        self._step_up = step_up
        self._low = low
        self._high = high
        self._relative = relative

    def up(self) -> None:
        """A sample exceeded the value."""
        self._move(self._step_up)

    def down(self, odds: float) -> None:
        """A sample did not exceed the value. `odds`: how many samples may exceed it for each one that does not."""
        self._move(-self._step_up * odds)

    def _move(self, step: float) -> None:
        moved = self.value * (1 + step) if self._relative else self.value + step
        self.value = min(self._high, max(self._low, moved))
