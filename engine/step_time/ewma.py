"""An exponentially weighted moving average, for step times, tier statistics and capacities."""


class Ewma:
    """A moving average. Each sample moves `value` closer to the sample by a share of the distance between them."""

    __slots__ = ("value", "weight")

    def __init__(self, weight: float, value: float = 0.0) -> None:
        """Start with the average `value`.

        Each sample moves the average towards the sample by `weight` times the difference between sample and average.
        `weight` is in (0, 1].
        """
        self.weight = weight
        self.value = value

    def add(self, sample: float, weight: float | None = None) -> float:
        """Add a sample and return the new average. If given, `weight` replaces the usual share for this sample."""
        self.value += (self.weight if weight is None else weight) * (sample - self.value)
        return self.value
