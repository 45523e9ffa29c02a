"""An exponentially weighted moving average, for step times, tier statistics and capacities."""


class Ewma:
    """A moving average. Each sample moves `value` towards the sample by the share `weight` of their distance."""

    __slots__ = ("value", "weight")

    def __init__(self, weight: float, value: float = 0.0) -> None:
        """`weight` is the weight of a new sample, in (0, 1]. `value` is the average before the first sample."""
        self.weight = weight
        self.value = value

    def add(self, sample: float, weight: float | None = None) -> float:
        """Add a sample and return the new average.

        `weight` replaces the usual weight for this sample; None: the usual weight.
        """
        self.value += (self.weight if weight is None else weight) * (sample - self.value)
        return self.value
